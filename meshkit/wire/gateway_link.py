"""Frames between gateway and scheduler: Scheduler.Submit, AttachGateway and the status in GetLoad."""

from typing import Final

from meshpb.v1 import scheduler_pb2 as pb

from meshkit.errors import WireError
from meshkit.frames import (
    Bye,
    CancelRows,
    Envelope,
    Frame,
    GatewayHello,
    GatewayHelloAck,
    Heartbeat,
    MovedRows,
    RowError,
    SchedulerStatus,
    StopRows,
    Submit,
    SubmitChoice,
    SubmitReply,
    TokenFrame,
    Verdict,
)
from meshkit.pages import NAMESPACE_BYTES
from meshkit.types import PAGE_TOKENS, FinishReason, RequestId
from meshkit.wire import columns as c
from meshkit.wire import shared

MAX_CHOICES = 1024
MAX_ROW_ERRORS = 65536
_LAST_FINISH: Final = int(max(FinishReason))


def put_submit(submit: Submit) -> pb.SubmitRequest:
    return pb.SubmitRequest(
        attach_id=submit.attach_id,
        request_id=submit.request_id,
        attempt=submit.attempt,
        choices=[
            pb.SubmitChoice(choice=it.choice, row=it.row, row_gen=it.row_gen, emitted=c.put_i32(it.emitted))
            for it in submit.choices
        ],
        tenant=submit.tenant,
        priority=submit.priority,
        params=shared.put_params(submit.params),
        seed=submit.seed,
        remaining_ms=submit.remaining_ms,
        prompt=c.put_i32(submit.prompt),
        page_keys=c.put_keys(submit.page_keys, "page_keys"),
        kill_count=submit.kill_count,
        traceparent=submit.traceparent,
        namespace=submit.namespace,
        grammar=shared.put_grammar(submit.grammar),
    )


def get_submit(message: pb.SubmitRequest) -> Submit:
    prompt = c.get_i32(message.prompt, "prompt")
    keys = c.get_keys(message.page_keys, "page_keys")
    if len(keys) > len(prompt) // PAGE_TOKENS:
        raise WireError(f"page_keys: {len(keys)} keys, a prompt of {len(prompt)} tokens fills fewer pages")
    if len(message.namespace) not in (0, NAMESPACE_BYTES):
        raise WireError(f"namespace: {len(message.namespace)} bytes; send {NAMESPACE_BYTES}, or none")
    c.get_int(len(message.choices), "number of choices", low=1, high=MAX_CHOICES)
    return Submit(
        attach_id=message.attach_id,
        request_id=RequestId(c.get_id(message.request_id, "request_id")),
        attempt=c.get_int(message.attempt, "attempt", low=1),
        choices=tuple(
            SubmitChoice(
                c.get_int(it.choice, "choice"),
                c.get_int(it.row, "row"),
                c.get_int(it.row_gen, "row_gen"),
                c.get_ints(it.emitted, "emitted"),
            )
            for it in message.choices
        ),
        params=shared.get_params(message.params),
        seed=message.seed,
        remaining_ms=c.get_int(message.remaining_ms, "remaining_ms"),
        prompt=prompt,
        page_keys=keys,
        tenant=c.get_text(message.tenant, "tenant"),
        priority=message.priority,
        kill_count=c.get_int(message.kill_count, "kill_count"),
        traceparent=c.get_text(message.traceparent, "traceparent"),
        namespace=message.namespace,
        grammar=shared.get_grammar(message.grammar) if message.HasField("grammar") else None,
    )


def get_explain(message: pb.ExplainRequest) -> tuple[bytes, ...]:
    keys = c.get_keys(message.page_keys, "page_keys")
    if len(keys) != message.tokens // PAGE_TOKENS:
        raise WireError(
            f"page_keys: {len(keys)} keys, {message.tokens} tokens fill {message.tokens // PAGE_TOKENS} pages"
        )
    return keys


def put_submit_reply(reply: SubmitReply) -> pb.SubmitReply:
    return pb.SubmitReply(
        verdict=pb.Verdict.ValueType(int(reply.verdict)),
        message=c.clip(reply.message),
        retry_after_ms=reply.retry_after_ms,
        place=c.clip(reply.place),
        grammar_rev=reply.grammar_rev,
    )


def get_submit_reply(message: pb.SubmitReply) -> SubmitReply:
    verdict = c.get_int(message.verdict, "verdict", high=max(Verdict))
    text = c.get_text(message.message, "message")
    return SubmitReply(
        Verdict(verdict),
        text,
        c.get_int(message.retry_after_ms, "retry_after_ms"),
        c.get_text(message.place, "place"),
        c.get_text(message.grammar_rev, "grammar_rev"),
    )


def put_status(status: SchedulerStatus) -> pb.SchedulerStatus:
    return pb.SchedulerStatus(
        ready=status.ready,
        draining=status.draining,
        model=None if status.model is None else shared.put_model(status.model),
        running=status.running,
        waiting=status.waiting,
        pages_total=status.pages_total,
        pages_free=status.pages_free,
        slots_total=status.slots_total,
        slots_free=status.slots_free,
        workers=status.workers,
        preemptions=status.preemptions,
        retry_after_ms=status.retry_after_ms,
        grammar_queue=status.grammar_queue,
    )


def get_status(message: pb.SchedulerStatus) -> SchedulerStatus:
    return SchedulerStatus(
        ready=message.ready,
        draining=message.draining,
        model=shared.get_model(message.model) if message.HasField("model") else None,
        running=message.running,
        waiting=message.waiting,
        pages_total=message.pages_total,
        pages_free=message.pages_free,
        slots_total=message.slots_total,
        slots_free=message.slots_free,
        workers=message.workers,
        preemptions=message.preemptions,
        retry_after_ms=message.retry_after_ms,
        grammar_queue=message.grammar_queue,
    )


def put_up(envelope: Envelope) -> pb.GatewayUp:
    frame, attach = envelope.frame, envelope.attach_id
    match frame:
        case GatewayHello():
            hello = pb.GatewayHello(name=frame.name, boot=frame.boot, build=frame.build, proto_rev=frame.proto_rev)
            return pb.GatewayUp(attach_id=attach, hello=hello)
        case Heartbeat():
            return pb.GatewayUp(attach_id=attach, heartbeat=shared.put_heartbeat(frame))
        case CancelRows():
            cancel = pb.CancelRows(rows=c.put_i32(frame.rows), row_gens=c.put_i32(frame.row_gens))
            return pb.GatewayUp(attach_id=attach, cancel=cancel)
        case StopRows():
            rows, gens, keeps = c.put_i32(frame.rows), c.put_i32(frame.row_gens), c.put_i32(frame.keeps)
            return pb.GatewayUp(attach_id=attach, stop=pb.StopRows(rows=rows, row_gens=gens, keeps=keeps))
        case Bye():
            return pb.GatewayUp(attach_id=attach, bye=shared.put_bye(frame))
        case _:
            raise WireError(f"{type(frame).__name__} does not travel from a gateway to the scheduler")


def get_up(message: pb.GatewayUp) -> Envelope:
    frame: Frame
    match message.WhichOneof("frame"):
        case "hello":
            frame = _get_hello(message.hello)
        case "heartbeat":
            frame = shared.get_heartbeat(message.heartbeat)
        case "cancel":
            rows = c.get_i32(message.cancel.rows, "cancel.rows")
            frame = CancelRows(rows, c.get_i32(message.cancel.row_gens, "cancel.row_gens", length=len(rows)))
        case "stop":
            rows = c.get_i32(message.stop.rows, "stop.rows")
            gens = c.get_i32(message.stop.row_gens, "stop.row_gens", length=len(rows))
            frame = StopRows(rows, gens, c.get_i32(message.stop.keeps, "stop.keeps", length=len(rows)))
        case "bye":
            frame = shared.get_bye(message.bye)
        case None:
            raise WireError("a GatewayUp without a frame this build knows")
    return Envelope(message.attach_id, frame)


def put_down(envelope: Envelope) -> pb.GatewayDown:
    frame, attach = envelope.frame, envelope.attach_id
    match frame:
        case TokenFrame():
            return pb.GatewayDown(attach_id=attach, tokens=_put_tokens(frame))
        case Heartbeat():
            return pb.GatewayDown(attach_id=attach, heartbeat=shared.put_heartbeat(frame))
        case SchedulerStatus():
            return pb.GatewayDown(attach_id=attach, status=put_status(frame))
        case MovedRows():
            rows, gens, kills = c.put_i32(frame.rows), c.put_i32(frame.row_gens), c.put_i32(frame.kills)
            return pb.GatewayDown(attach_id=attach, moved=pb.MovedRows(rows=rows, row_gens=gens, kills=kills))
        case GatewayHelloAck():
            return pb.GatewayDown(attach_id=attach, hello_ack=pb.GatewayHelloAck(boot=frame.boot, build=frame.build))
        case Bye():
            return pb.GatewayDown(attach_id=attach, bye=shared.put_bye(frame))
        case _:
            raise WireError(f"{type(frame).__name__} does not travel from the scheduler to a gateway")


def get_down(message: pb.GatewayDown) -> Envelope:
    frame: Frame
    match message.WhichOneof("frame"):
        case "tokens":
            frame = _get_tokens(message.tokens)
        case "heartbeat":
            frame = shared.get_heartbeat(message.heartbeat)
        case "status":
            frame = get_status(message.status)
        case "moved":
            rows = c.get_i32(message.moved.rows, "moved.rows")
            gens = c.get_i32(message.moved.row_gens, "moved.row_gens", length=len(rows))
            frame = MovedRows(rows, gens, c.get_i32(message.moved.kills, "moved.kills", length=len(rows)))
        case "hello_ack":
            frame = GatewayHelloAck(message.hello_ack.boot, c.get_text(message.hello_ack.build, "hello_ack.build"))
        case "bye":
            frame = shared.get_bye(message.bye)
        case None:
            raise WireError("a GatewayDown without a frame this build knows")
    return Envelope(message.attach_id, frame)


def _get_hello(message: pb.GatewayHello) -> GatewayHello:
    return GatewayHello(
        c.get_text(message.name, "hello.name"),
        message.boot,
        c.get_text(message.build, "hello.build"),
        message.proto_rev,
    )


def _put_tokens(frame: TokenFrame) -> pb.TokenFrame:
    return pb.TokenFrame(
        step=frame.step,
        rows=c.put_i32(frame.rows),
        row_gens=c.put_i32(frame.row_gens),
        bases=c.put_i32(frame.bases),
        counts=c.put_i32(frame.counts),
        ids=c.put_i32(frame.ids),
        finishes=c.put_u8(frame.finishes),
        logprobs=shared.put_logprobs(frame.logprobs),
        errors=[pb.RowError(index=it.row_index, code=it.code, message=c.clip(it.message)) for it in frame.errors],
        cached=c.put_i32(frame.cached),
        waited_rows=c.put_i32(frame.waited_rows),
        waited_ms=c.put_i32(frame.waited_ms),
    )


def _get_tokens(message: pb.TokenFrame) -> TokenFrame:
    rows = c.get_i32(message.rows, "tokens.rows")
    n = len(rows)
    counts = c.get_i32(message.counts, "tokens.counts", length=n)
    ids = c.get_i32(message.ids, "tokens.ids")
    c.check_sum(counts, len(ids), "tokens.counts", "tokens.ids")
    c.get_int(len(message.errors), "number of tokens.errors", high=min(n, MAX_ROW_ERRORS))
    waited = c.get_i32(message.waited_rows, "tokens.waited_rows", high=n - 1)
    return TokenFrame(
        step=message.step,
        rows=rows,
        row_gens=c.get_i32(message.row_gens, "tokens.row_gens", length=n),
        bases=c.get_i32(message.bases, "tokens.bases", length=n),
        counts=counts,
        ids=ids,
        finishes=c.get_u8(message.finishes, "tokens.finishes", high=_LAST_FINISH, length=n),
        cached=c.get_i32(message.cached, "tokens.cached", length=n if message.cached else 0),
        logprobs=shared.get_logprobs(message.logprobs, n),
        errors=tuple(
            RowError(
                c.get_int(it.index, "error.index", high=n - 1),
                c.get_text(it.code, "error.code"),
                c.get_text(it.message, "error.message"),
            )
            for it in message.errors
        ),
        waited_rows=waited,
        waited_ms=c.get_i32(message.waited_ms, "tokens.waited_ms", length=len(waited)),
    )
