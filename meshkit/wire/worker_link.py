"""Frames between scheduler and worker: Scheduler.AttachWorker in both directions."""

from typing import Final

from meshpb.v1 import worker_pb2 as pb

from meshkit.errors import WireError
from meshkit.frames import (
    I32,
    Bye,
    Dump,
    DumpSlot,
    Envelope,
    Frame,
    Heartbeat,
    PageAppend,
    PublishedPage,
    PublishedTail,
    ResultFrame,
    RowFault,
    RowState,
    SlotCopy,
    SlotFree,
    SlotInit,
    Spare,
    StepFrame,
    TailLoad,
    TailSave,
    WorkerHello,
    WorkerHelloAck,
)
from meshkit.types import NO_PAGE, RequestId
from meshkit.wire import columns as c
from meshkit.wire import shared

MAX_LAST_IDS = 128
NO_TAIL = -1


def put_up(envelope: Envelope) -> pb.WorkerUp:
    frame, attach = envelope.frame, envelope.attach_id
    match frame:
        case ResultFrame():
            return pb.WorkerUp(attach_id=attach, result=_put_result(frame))
        case Heartbeat():
            return pb.WorkerUp(attach_id=attach, heartbeat=shared.put_heartbeat(frame))
        case WorkerHello():
            return pb.WorkerUp(attach_id=attach, hello=_put_hello(frame))
        case Dump():
            return pb.WorkerUp(attach_id=attach, dump=_put_dump(frame))
        case Bye():
            return pb.WorkerUp(attach_id=attach, bye=shared.put_bye(frame))
        case _:
            raise WireError(f"{type(frame).__name__} does not travel from a worker to the scheduler")


def get_up(message: pb.WorkerUp) -> Envelope:
    frame: Frame
    match message.WhichOneof("frame"):
        case "result":
            frame = _get_result(message.result)
        case "heartbeat":
            frame = shared.get_heartbeat(message.heartbeat)
        case "hello":
            frame = _get_hello(message.hello)
        case "dump":
            frame = _get_dump(message.dump)
        case "bye":
            frame = shared.get_bye(message.bye)
        case None:
            raise WireError("a WorkerUp without a frame this build knows")
    return Envelope(message.attach_id, frame)


def put_down(envelope: Envelope) -> pb.WorkerDown:
    frame, attach = envelope.frame, envelope.attach_id
    match frame:
        case StepFrame():
            return pb.WorkerDown(attach_id=attach, step=_put_step(frame))
        case Heartbeat():
            return pb.WorkerDown(attach_id=attach, heartbeat=shared.put_heartbeat(frame))
        case WorkerHelloAck():
            return pb.WorkerDown(attach_id=attach, hello_ack=pb.WorkerHelloAck(boot=frame.boot))
        case Bye():
            return pb.WorkerDown(attach_id=attach, bye=shared.put_bye(frame))
        case _:
            raise WireError(f"{type(frame).__name__} does not travel from the scheduler to a worker")


def get_down(message: pb.WorkerDown) -> Envelope:
    frame: Frame
    match message.WhichOneof("frame"):
        case "step":
            frame = _get_step(message.step)
        case "heartbeat":
            frame = shared.get_heartbeat(message.heartbeat)
        case "hello_ack":
            frame = WorkerHelloAck(message.hello_ack.boot)
        case "bye":
            frame = shared.get_bye(message.bye)
        case None:
            raise WireError("a WorkerDown without a frame this build knows")
    return Envelope(message.attach_id, frame)


# ---- hello and dump -------------------------------------------------------------------------------------------------


def _put_hello(hello: WorkerHello) -> pb.WorkerHello:
    return pb.WorkerHello(
        group=hello.group,
        boot=hello.boot,
        build=hello.build,
        proto_rev=hello.proto_rev,
        model=shared.put_model(hello.model),
        ranks=hello.ranks,
        slots=hello.slots,
        pages=hello.pages,
        tails=hello.tails,
        max_gen=hello.max_gen,
        max_step_tokens=hello.max_step_tokens,
        max_verify=hello.max_verify,
    )


def _get_hello(message: pb.WorkerHello) -> WorkerHello:
    if not message.HasField("model"):
        raise WireError("hello.model: missing")
    hello = WorkerHello(
        group=c.get_text(message.group, "hello.group"),
        boot=message.boot,
        build=c.get_text(message.build, "hello.build"),
        proto_rev=message.proto_rev,
        model=shared.get_model(message.model),
        ranks=c.get_int(message.ranks, "hello.ranks", low=1),
        slots=c.get_int(message.slots, "hello.slots", low=1),
        pages=c.get_int(message.pages, "hello.pages", low=1),
        tails=c.get_int(message.tails, "hello.tails"),
        max_gen=c.get_int(message.max_gen, "hello.max_gen", high=c.MAX_I64),
        max_step_tokens=c.get_int(message.max_step_tokens, "hello.max_step_tokens", low=1),
        max_verify=c.get_int(message.max_verify, "hello.max_verify", low=1),
    )
    # Global ids are rank * size + local and travel as int32.
    c.get_int(hello.ranks * max(hello.slots, hello.pages, hello.tails), "hello: ranks * largest pool")
    return hello


def _put_dump(dump: Dump) -> pb.Dump:
    return pb.Dump(
        slots=[_put_dump_slot(slot) for slot in dump.slots],
        pages=c.put_i32([it.page for it in dump.pages]),
        page_gens=c.put_i64([it.page_gen for it in dump.pages]),
        page_parents=c.put_i32([it.parent for it in dump.pages]),
        page_keys=c.put_keys([it.key for it in dump.pages], "dump.page_keys"),
        tails=c.put_i32([it.tail for it in dump.tails]),
        tail_pages=c.put_i32([it.page for it in dump.tails]),
        last=dump.last,
    )


def _get_dump(message: pb.Dump) -> Dump:
    return Dump(
        slots=tuple(_get_dump_slot(slot) for slot in message.slots),
        pages=_get_pages(message.pages, message.page_gens, message.page_parents, message.page_keys, "dump.page"),
        tails=_get_tails(message.tails, message.tail_pages, "dump.tail"),
        last=message.last,
    )


def _put_dump_slot(slot: DumpSlot) -> pb.DumpSlot:
    return pb.DumpSlot(
        slot=slot.slot,
        slot_gen=slot.slot_gen,
        request_id=slot.request_id,
        attempt=slot.attempt,
        choice=slot.choice,
        length=slot.length,
        n_emitted=slot.n_emitted,
        next=slot.next,
        finished=slot.finished,
        last_ids=c.put_i32(slot.last_ids),
        pages=c.put_i32(slot.pages),
        spare=slot.spare,
        spare_pos=slot.spare_pos,
        grammar_id=slot.grammar_id,
    )


def _get_dump_slot(message: pb.DumpSlot) -> DumpSlot:
    last_ids = c.get_ints(message.last_ids, "dump.last_ids")
    c.get_int(len(last_ids), "number of dump.last_ids", high=MAX_LAST_IDS)
    return DumpSlot(
        slot=c.get_int(message.slot, "dump.slot"),
        slot_gen=c.get_int(message.slot_gen, "dump.slot_gen", high=c.MAX_I64),
        request_id=RequestId(c.get_id(message.request_id, "dump.request_id")),
        attempt=c.get_int(message.attempt, "dump.attempt"),
        choice=c.get_int(message.choice, "dump.choice"),
        length=c.get_int(message.length, "dump.length"),
        n_emitted=c.get_int(message.n_emitted, "dump.n_emitted"),
        next=c.get_int(message.next, "dump.next"),
        finished=message.finished,
        last_ids=last_ids,
        pages=c.get_ints(message.pages, "dump.pages"),
        spare=c.get_int(message.spare, "dump.spare", low=NO_TAIL),
        spare_pos=c.get_int(message.spare_pos, "dump.spare_pos"),
        grammar_id=c.get_id(message.grammar_id, "dump.grammar_id") if message.grammar_id else b"",
    )


def _get_pages(pages: bytes, gens: bytes, parents: bytes, keys: bytes, field: str) -> tuple[PublishedPage, ...]:
    if not (pages or gens or parents or keys):
        return ()
    ids = c.get_ints(pages, f"{field}s")
    n = len(ids)
    page_gens = c.get_i64(gens, f"{field}_gens", length=n).tolist()
    page_parents = c.get_ints(parents, f"{field}_parents", low=NO_PAGE, length=n)
    page_keys = c.get_keys(keys, f"{field}_keys", length=n)
    return tuple(map(PublishedPage, ids, page_gens, page_parents, page_keys))


def _get_tails(tails: bytes, pages: bytes, field: str) -> tuple[PublishedTail, ...]:
    if not (tails or pages):
        return ()
    ids = c.get_ints(tails, f"{field}s")
    return tuple(map(PublishedTail, ids, c.get_ints(pages, f"{field}_pages", length=len(ids))))


# ---- steps ----------------------------------------------------------------------------------------------------------


def _put_step(frame: StepFrame) -> pb.StepFrame:
    message = pb.StepFrame(
        step=frame.step,
        kind=int(frame.decode_only),
        rank_off=c.put_i32(frame.rank_off),
        slots=c.put_i32(frame.slots),
        chunk_rows=c.put_i32(frame.chunk_rows),
        chunk_starts=c.put_i32(frame.chunk_starts),
        chunk_lens=c.put_i32(frame.chunk_lens),
        chunk_write_froms=c.put_i32(frame.chunk_write_froms),
        chunk_samples=c.put_u8(frame.chunk_samples),
        chunk_ids=c.put_i32(frame.chunk_ids),
    )
    _put_orders(frame, message)
    return message


def _put_orders(frame: StepFrame, message: pb.StepFrame) -> None:
    """The rare columns: most decode steps carry none of them, so each is skipped when empty."""
    if frame.retire_pages or frame.retire_tails:
        message.retire_pages = c.put_i32(frame.retire_pages)
        message.retire_tails = c.put_i32(frame.retire_tails)
    if frame.frees:
        message.free_slots = c.put_i32([it.slot for it in frame.frees])
        message.free_gens = c.put_i64([it.slot_gen for it in frame.frees])
    if frame.inits:
        message.inits.extend(_put_init(it) for it in frame.inits)
    if frame.spares:
        message.spare_slots = c.put_i32([it.slot for it in frame.spares])
        message.spare_tails = c.put_i32([it.tail for it in frame.spares])
    if frame.copies:
        message.copies = c.put_i32([value for it in frame.copies for value in it])
    if frame.appends:
        message.append_slots = c.put_i32([it.slot for it in frame.appends])
        message.append_pages = c.put_i32([it.page for it in frame.appends])
    if frame.tail_loads:
        message.load_slots = c.put_i32([it.slot for it in frame.tail_loads])
        message.load_tails = c.put_i32([it.tail for it in frame.tail_loads])
    if frame.tail_saves:
        message.save_slots = c.put_i32([it.slot for it in frame.tail_saves])
        message.save_positions = c.put_i32([it.pos for it in frame.tail_saves])
        message.save_tails = c.put_i32([it.tail for it in frame.tail_saves])
    if frame.publishes:
        message.publish_pages = c.put_i32([it.page for it in frame.publishes])
        message.publish_gens = c.put_i64([it.page_gen for it in frame.publishes])
        message.publish_parents = c.put_i32([it.parent for it in frame.publishes])
        message.publish_keys = c.put_keys([it.key for it in frame.publishes], "publish_keys")
    if frame.publish_tails:
        message.publish_tails = c.put_i32([it.tail for it in frame.publish_tails])
        message.publish_tail_pages = c.put_i32([it.page for it in frame.publish_tails])


def _get_step(m: pb.StepFrame) -> StepFrame:
    slots = c.get_i32(m.slots, "slots")
    chunk_rows = c.get_i32(m.chunk_rows, "chunk_rows", high=len(slots) - 1)
    n = len(chunk_rows)
    if len(set(chunk_rows.tolist())) != n:
        raise WireError("chunk_rows: a row is named twice")
    chunk_lens = c.get_i32(m.chunk_lens, "chunk_lens", low=1, length=n)
    chunk_ids = c.get_i32(m.chunk_ids, "chunk_ids")
    c.check_sum(chunk_lens, len(chunk_ids), "chunk_lens", "chunk_ids")
    kind = c.get_int(m.kind, "kind", high=1)
    if kind == 1 and n:
        raise WireError(f"kind: 1 is decode only, the frame has {n} chunks")
    copies = c.get_ints(m.copies, "copies", low=NO_PAGE)
    if len(copies) % 4:
        raise WireError(f"copies: {len(copies)} items are no whole number of (src, dst, src_page, dst_page)")
    return StepFrame(
        step=m.step,
        slots=slots,
        rank_off=_get_rank_off(m.rank_off, len(slots)),
        decode_only=kind == 1,
        chunk_rows=chunk_rows,
        chunk_starts=c.get_i32(m.chunk_starts, "chunk_starts", length=n),
        chunk_lens=chunk_lens,
        chunk_write_froms=c.get_i32(m.chunk_write_froms, "chunk_write_froms", length=n),
        chunk_samples=c.get_u8(m.chunk_samples, "chunk_samples", high=1, length=n),
        chunk_ids=chunk_ids,
        retire_pages=c.get_ints(m.retire_pages, "retire_pages") if m.retire_pages else (),
        retire_tails=c.get_ints(m.retire_tails, "retire_tails") if m.retire_tails else (),
        frees=_get_frees(m),
        inits=tuple(_get_init(it) for it in m.inits),
        spares=tuple(map(Spare, *_get_pairs(m.spare_slots, m.spare_tails, "spare_slots", "spare_tails"))),
        copies=tuple(SlotCopy(*_checked_copy(copies[at : at + 4])) for at in range(0, len(copies), 4)),
        appends=tuple(map(PageAppend, *_get_pairs(m.append_slots, m.append_pages, "append_slots", "append_pages"))),
        tail_loads=tuple(map(TailLoad, *_get_pairs(m.load_slots, m.load_tails, "load_slots", "load_tails"))),
        tail_saves=_get_saves(m),
        publishes=_get_pages(m.publish_pages, m.publish_gens, m.publish_parents, m.publish_keys, "publish_page"),
        publish_tails=_get_tails(m.publish_tails, m.publish_tail_pages, "publish_tail"),
    )


def _get_rank_off(data: bytes, num_rows: int) -> I32:
    """Empty (one rank), or offsets from 0 to num_rows that never fall."""
    column = c.get_i32(data, "rank_off", high=num_rows)
    offsets = column.tolist()
    if offsets and (len(offsets) < 2 or offsets[0] or offsets[-1] != num_rows or offsets != sorted(offsets)):
        raise WireError(f"rank_off: {offsets[:8]} are no rising offsets from 0 to {num_rows}")
    return column


def _get_pairs(left: bytes, right: bytes, left_field: str, right_field: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not (left or right):
        return (), ()
    first = c.get_ints(left, left_field)
    return first, c.get_ints(right, right_field, length=len(first))


def _get_frees(m: pb.StepFrame) -> tuple[SlotFree, ...]:
    if not (m.free_slots or m.free_gens):
        return ()
    slots = c.get_ints(m.free_slots, "free_slots")
    return tuple(map(SlotFree, slots, c.get_i64(m.free_gens, "free_gens", length=len(slots)).tolist()))


def _get_saves(m: pb.StepFrame) -> tuple[TailSave, ...]:
    if not (m.save_slots or m.save_positions or m.save_tails):
        return ()
    slots = c.get_ints(m.save_slots, "save_slots")
    positions = c.get_ints(m.save_positions, "save_positions", length=len(slots))
    return tuple(map(TailSave, slots, positions, c.get_ints(m.save_tails, "save_tails", length=len(slots))))


def _checked_copy(quad: tuple[int, ...]) -> tuple[int, ...]:
    src, dst, src_page, dst_page = quad
    if src < 0 or dst < 0 or (src_page < 0) != (dst_page < 0):
        raise WireError(f"copies: {list(quad)} needs two slots, and two pages or none")
    return quad


def _put_init(init: SlotInit) -> pb.SlotInit:
    return pb.SlotInit(
        slot=init.slot,
        slot_gen=init.slot_gen,
        request_id=init.request_id,
        attempt=init.attempt,
        choice=init.choice,
        params=shared.put_params(init.params),
        seed=init.seed,
        start=init.start,
        n_emitted=init.n_emitted,
        emitted=c.put_i32(init.emitted),
        prompt=c.put_i32(init.prompt),
        grammar_id=init.grammar_id,
        thinking=init.thinking,
        traceparent=init.traceparent,
    )


def _get_init(message: pb.SlotInit) -> SlotInit:
    return SlotInit(
        slot=c.get_int(message.slot, "init.slot"),
        slot_gen=c.get_int(message.slot_gen, "init.slot_gen", high=c.MAX_I64),
        request_id=RequestId(c.get_id(message.request_id, "init.request_id")),
        attempt=c.get_int(message.attempt, "init.attempt"),
        choice=c.get_int(message.choice, "init.choice"),
        params=shared.get_params(message.params),
        seed=message.seed,
        start=c.get_int(message.start, "init.start"),
        n_emitted=c.get_int(message.n_emitted, "init.n_emitted"),
        emitted=c.get_ints(message.emitted, "init.emitted"),
        prompt=c.get_ints(message.prompt, "init.prompt"),
        grammar_id=c.get_id(message.grammar_id, "init.grammar_id") if message.grammar_id else b"",
        thinking=message.thinking,
        traceparent=c.get_text(message.traceparent, "init.traceparent"),
    )


def _put_result(frame: ResultFrame) -> pb.ResultFrame:
    return pb.ResultFrame(
        step=frame.step,
        t_start_ns=frame.t_start_ns,
        t_end_ns=frame.t_end_ns,
        states=c.put_u8(frame.states),
        counts=c.put_u8(frame.counts),
        tokens=c.put_i32(frame.tokens),
        spare_rows=c.put_i32(frame.spare_rows),
        spare_positions=c.put_i32(frame.spare_positions),
        logprobs=shared.put_logprobs(frame.logprobs),
        jit_compiles=frame.jit_compiles,
        error=c.clip(frame.error),
        faults=[pb.RowFault(index=it.row_index, code=it.code, message=c.clip(it.message)) for it in frame.faults],
    )


_LAST_STATE: Final = int(max(RowState))


def _get_result(message: pb.ResultFrame) -> ResultFrame:
    states = c.get_u8(message.states, "states", high=_LAST_STATE)
    n = len(states)
    counts = c.get_u8(message.counts, "counts", length=n)
    tokens = c.get_i32(message.tokens, "tokens")
    c.check_sum(counts, len(tokens), "counts", "tokens")
    spare_rows = c.get_i32(message.spare_rows, "spare_rows", high=n - 1)
    c.get_int(len(message.faults), "number of faults", high=n)
    return ResultFrame(
        step=message.step,
        t_start_ns=message.t_start_ns,
        t_end_ns=message.t_end_ns,
        states=states,
        counts=counts,
        tokens=tokens,
        spare_rows=spare_rows,
        spare_positions=c.get_i32(message.spare_positions, "spare_positions", length=len(spare_rows)),
        logprobs=shared.get_logprobs(message.logprobs, n),
        jit_compiles=message.jit_compiles,
        error=c.get_text(message.error, "error"),
        faults=tuple(
            RowFault(
                c.get_int(it.index, "fault.index", high=n - 1),
                c.get_text(it.code, "fault.code"),
                c.get_text(it.message, "fault.message"),
            )
            for it in message.faults
        ),
    )
