"""Every flag and environment variable of the operators' guide, and what v4mesh does with it.

The guide was written for SGLang (and borrows from vLLM); several of its names never existed there, and ours do what
its text promises. Each that is given is answered with one line. An entry with `needs` is understood and checked, but
its part is not built: the line says so, and `serve` goes on with `meanwhile`; the others say what they did. A value
that no part could ever honour is refused with the accepted ones.
Pure data and pure functions: reads no file and no environment, starts nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from meshkit.compile_modes import COMPILE_MODES, NOTHING_ON_A_GPU
from meshkit.config import parse_size
from meshkit.exit_codes import Exit, Problem
from meshkit.numerics_names import KV_DTYPES, SCHEMES

Parser = Callable[[str], Any]
GPUS = "several GPUs under one worker"
EXPERTS_APART = "experts spread over GPUs"
DRAFTING = "speculative decoding"
BLACKWELL = "a forward for Blackwell"
TIERS = "the cache service"


def whole(low: int, high: int) -> Parser:
    """An integer from low to high."""

    def parse(text: str) -> int:
        if not text.strip().lstrip("+").isdecimal() or not low <= int(text) <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return int(text)

    return parse


def one_of(*names: str) -> Parser:
    """One of these, written in either case."""

    def parse(text: str) -> str:
        found = {n.lower(): n for n in names}.get(text.strip().lower())
        if found is None:
            raise ValueError(f"must be one of {', '.join(names)}")
        return found

    return parse


def yes_no(text: str) -> bool:
    """A switch in the environment."""
    word = text.strip().lower()
    if word not in ("1", "0", "true", "false", "yes", "no", "on", "off"):
        raise ValueError("must be 1 or 0, true or false, yes or no, on or off")
    return word in ("1", "true", "yes", "on")


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError("must be a number above 0")
    return value


def words(text: str) -> str:
    """Any text that is not empty."""
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def redis_url(text: str) -> str:
    """redis://host[:port][/db] or rediss://."""
    parts = urlsplit(text)
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ValueError("must be redis://HOST[:PORT][/DB] or rediss://...")
    return text


def optional_blank(text: str) -> str:
    """A pattern of at most one blank character between JSON tokens, which is what is allowed anyway."""
    if text not in ONE_BLANK:
        raise ValueError(f"must be one of {', '.join(ONE_BLANK)}: at most one blank is allowed between JSON tokens")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One flag or variable. `quiet` are values that ask for nothing beyond what runs anyway."""

    name: str
    promise: str
    ours: str
    parse: Parser = words
    aliases: tuple[str, ...] = ()
    switch: bool = False
    needs: str = ""
    meanwhile: str = ""
    does: str = ""  # what an entry that has its effect did
    quiet: tuple[Any, ...] = ()
    invented: bool = False  # SGLang itself never had this name

    @property
    def field(self) -> str:
        """The flag's name as an identifier: `--tp` is tp."""
        return self.name.removeprefix("--").replace("-", "_")


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one entry that was given, and the line that says so."""

    entry: Entry
    given: str
    value: Any
    status: Literal["applied", "recognised"]
    line: str


MOE_BACKENDS = ("deep_gemm", "flashinfer_trtllm", "flashinfer_cutedsl")
EVICT_POLICIES = ("lru", "lfu", "slru", "priority", "tlru")
ONE_BLANK = ("[ ]?", " ?", r"[\n ]?", r"[\n\t ]?", r"\s?")

FLAGS: tuple[Entry, ...] = (
    Entry(
        name="--model-path",
        aliases=("--model",),
        promise="Model folder, or hub id in a local cache.",
        ours="up.model",
        does="the worker loads it, the gateway reads its tokenizer",
    ),
    Entry(name="--host", promise="Address to listen on.", ours="up.host", does="the gateway listens there"),
    Entry(
        name="--port",
        promise="Port to listen on; 0: a free one.",
        ours="up.port",
        parse=whole(0, 65535),
        does="the gateway listens there",
    ),
    Entry(
        name="--trust-remote-code",
        promise="Allow code that comes with the model.",
        ours="nothing",
        switch=True,
        does="accepted, and runs nothing: no code from the model's folder is ever executed",
    ),
    Entry(
        name="--tp",
        aliases=("--tp-size", "--tensor-parallel-size"),
        promise="Attention tensor parallel size.",
        ours="worker.attention_tp",
        parse=whole(1, 1024),
        needs=GPUS,
        meanwhile="running with 1",
        quiet=(1,),
    ),
    Entry(
        name="--ep-size",
        aliases=("--ep", "--expert-parallel-size"),
        promise="Expert parallel size.",
        ours="worker.expert_parallel",
        parse=whole(1, 1024),
        needs=EXPERTS_APART,
        meanwhile="running with 1",
        quiet=(1,),
    ),
    Entry(
        name="--enable-expert-parallel",
        promise="Expert parallel over all GPUs.",
        ours="worker.expert_parallel",
        switch=True,
        needs=EXPERTS_APART,
        meanwhile="all experts are in one worker",
        invented=True,
    ),
    Entry(
        name="--enable-deepep",
        promise="DeepEP all-to-all between experts.",
        ours="experts.transport",
        switch=True,
        needs=EXPERTS_APART,
        meanwhile="there is nothing to exchange",
        invented=True,
    ),
    Entry(
        name="--enable-two-batch-overlap",
        promise="Overlap two micro-batches.",
        ours="worker.two_batch_overlap",
        switch=True,
        needs=EXPERTS_APART,
        meanwhile="there is no exchange to hide",
    ),
    Entry(
        name="--moe-fp8-communication",
        promise="FP8 in the experts' dispatch.",
        ours="experts.dispatch_dtype",
        switch=True,
        needs=EXPERTS_APART,
        meanwhile="there is nothing to exchange",
        invented=True,
    ),
    Entry(
        name="--moe-dp-size",
        promise="Replica groups of the shared expert.",
        ours="worker.moe_dp_size",
        parse=whole(1, 1024),
        needs=GPUS,
        meanwhile="running with 1",
        quiet=(1,),
    ),
    Entry(
        name="--attention-dp-size",
        aliases=("--attn-dp-size", "--attention-data-parallel-size"),
        promise="Attention data parallel size.",
        ours="worker.attention_dp_size",
        parse=whole(1, 1024),
        needs=GPUS,
        meanwhile="running with 1",
        quiet=(1,),
    ),
    Entry(
        name="--attention-cp-size",
        aliases=("--attn-cp-size", "--attention-context-parallel-size"),
        promise="Attention context parallel size.",
        ours="worker.attention_cp_size",
        parse=whole(1, 1024),
        needs=GPUS,
        meanwhile="running with 1",
        quiet=(1,),
    ),
    Entry(
        name="--kv-cache-dtype",
        promise="Format of the KV cache; fp8 is fp8_e4m3. RoPE dims stay BF16.",
        ours="worker.kv_cache_dtype",
        parse=one_of(*KV_DTYPES),
        does="the worker keeps KV in this format, RoPE dims in BF16 where it is an FP8 one",
        quiet=("auto",),
    ),
    Entry(
        name="--quantization",
        promise="Weight and activation scheme, checked against the checkpoint.",
        ours="worker.quantization",
        parse=one_of(*SCHEMES),
        does="the worker rounds as this scheme does, if the checkpoint has its format",
        quiet=("auto", "exact"),
    ),
    Entry(
        name="--grammar-backend",
        promise="What compiles constraints on the output; none: constrained requests are refused.",
        ours="up.grammar",
        parse=one_of("xgrammar", "none"),
        does="a grammar service with its standby compiles constraints and computes masks, or none does",
    ),
    Entry(
        name="--constrained-json-disable-any-whitespace",
        promise="Write constrained JSON without blanks between its tokens.",
        ours="grammar.json_whitespace",
        switch=True,
        does="the grammar service allows no blank between JSON tokens (inside tool calls and structural tags: one)",
    ),
    Entry(
        name="--constrained-json-whitespace-pattern",
        promise="Which blanks may stand between JSON tokens.",
        ours="grammar.json_whitespace",
        parse=optional_blank,
        quiet=ONE_BLANK,
    ),
    Entry(
        name="--enable-torch-compile",
        promise="Compile with torch what lies between products.",
        ours="worker.torch_compile",
        switch=True,
        does=f"a CPU worker fuses what lies between products with torch's compiler, before it is ready; on a GPU "
        f"nothing changes: {NOTHING_ON_A_GPU}",
    ),
    Entry(
        name="--speculative-algorithm",
        promise="How tokens are drafted.",
        ours="speculation.algorithm",
        parse=one_of("MTP", "EAGLE", "DFLASH", "NEXTN"),
        needs=DRAFTING,
        meanwhile="decoding one token per step",
    ),
    Entry(
        name="--speculative-num-steps",
        promise="Tokens drafted per step.",
        ours="speculation.num_steps",
        parse=whole(0, 16),
        needs=DRAFTING,
        meanwhile="decoding one token per step",
        quiet=(0,),
    ),
    Entry(
        name="--speculative-eagle-model-path",
        aliases=("--speculative-draft-model-path",),
        promise="Folder of the draft model.",
        ours="speculation.model_path",
        needs=DRAFTING,
        meanwhile="the draft model is not loaded",
        invented=True,
    ),
)

VARIABLES: tuple[Entry, ...] = (
    Entry(
        name="DEEPGEMM_ENABLE_JIT",
        promise="Compile DeepGEMM kernels on demand.",
        ours="worker.jit",
        parse=yes_no,
        does="a GPU worker refuses to start unless `v4mesh precache` has compiled everything",
        quiet=(True,),
        invented=True,
    ),
    Entry(
        name="DEEPGEMM_FORCE_RECOMPILE",
        promise="Ignore the kernel cache.",
        ours="worker.jit_recompile",
        parse=yes_no,
        does="a GPU worker compiles every kernel again, of all packages, into a folder of its own",
        quiet=(False,),
        invented=True,
    ),
    Entry(
        name="DEEPGEMM_CACHE_DIR",
        promise="Folder of the kernel cache (DeepGEMM's own DG_JIT_CACHE_DIR).",
        ours="worker.kernel_cache",
        does="a GPU worker keeps the compiled kernels of all packages there, in a folder per GPU and versions",
        invented=True,
    ),
    Entry(
        name="FLASHINFER_AUTOTUNE",
        promise="Tune kernels per shape.",
        ours="worker.autotune",
        parse=yes_no,
        does="a GPU worker computes with the built-in choices, whatever `v4mesh precache --tune` measured",
        quiet=(True,),
        invented=True,
    ),
    Entry(
        name="FLASHINFER_AUTOTUNE_CACHE_DIR",
        promise="Folder of the tuning results.",
        ours="worker.autotune_cache",
        does="`v4mesh precache --tune` leaves what it measured there, and a GPU worker looks there",
        invented=True,
    ),
    Entry(
        name="SGLANG_MOE_BACKEND",
        promise="Kernels of the experts.",
        ours="worker.kernel",
        parse=one_of(*MOE_BACKENDS),
        needs=f"FP4 experts by that package, which have no kernel for Hopper, and {BLACKWELL}",
        meanwhile="humming and our own product compute the experts on a GPU, torch on the CPU",
        invented=True,
    ),
    Entry(
        name="SGLANG_SCHEDULE_CONSERVATIVENESS",
        promise="How boldly batches are built.",
        ours="scheduler.conservativeness",
        parse=positive,
        does="admission keeps room for this share of the expected output (1 or more: for all of it)",
        invented=True,
    ),
    Entry(
        name="SGLANG_TORCH_COMPILE_MODE",
        promise="Mode of torch.compile.",
        ours="worker.torch_compile_mode",
        parse=one_of(*COMPILE_MODES),
        does="with --enable-torch-compile a CPU worker gives the compiler this mode's options; they are about GPU "
        "graphs and products, so the fused pieces come out the same",
        quiet=("default",),
        invented=True,
    ),
    Entry(
        name="SGLANG_ELASTIC_MEMORY_POOL",
        promise="One pool for KV and recurrent states.",
        ours="worker.elastic_pool",
        parse=yes_no,
        needs="the elastic memory pool",
        meanwhile="KV has its own pool, and this model has no recurrent state",
        quiet=(False,),
        invented=True,
    ),
    Entry(
        name="SGLANG_HICACHE_L2_SIZE",
        promise="Host memory for cached KV.",
        ours="cache.l2_bytes",
        parse=parse_size,
        needs=TIERS,
        meanwhile="KV stays with the worker",
        quiet=(0,),
        invented=True,
    ),
    Entry(
        name="SGLANG_HICACHE_L3_URL",
        promise="Remote cache.",
        ours="cache.l3_url",
        parse=redis_url,
        needs=TIERS,
        meanwhile="nothing is stored remotely",
        invented=True,
    ),
    Entry(
        name="SGLANG_RADIX_CACHE_TARGET_SLIDING_WINDOW",
        promise="How many resume points are kept per prefix.",
        ours="scheduler.tail_windows",
        parse=whole(0, 1 << 20),
        does="keeps so many resume points inside each long prompt, beside those at its end and where prompts part",
        invented=True,
    ),
    Entry(
        name="SGLANG_RADIX_CACHE_EVICT_POLICY",
        promise="What the prefix cache drops first.",
        ours="scheduler.evict_policy",
        parse=one_of(*EVICT_POLICIES),
        needs="another order of eviction",
        meanwhile="what was used least recently goes first",
        quiet=("lru",),
        invented=True,
    ),
)


def answer(entry: Entry, given: str, name: str = "") -> Answer:
    """Parse one value, given under `name`, and say what it does; raises ValueError with the accepted values."""
    name = name or entry.name
    value = True if entry.switch else entry.parse(given)
    shown = name if entry.switch else f"{name}{' ' if name.startswith('--') else '='}{given}"
    if value in entry.quiet:
        return Answer(entry, given, value, "applied", f"applied: {shown} ({entry.ours}): it runs like this anyway")
    origin = "; SGLang never had this name" if entry.invented else ""
    if not entry.needs:
        return Answer(entry, given, value, "applied", f"applied: {shown} ({entry.ours}): {entry.does}")
    line = f"recognised: {shown} ({entry.ours}{origin}) needs {entry.needs}, which is not built yet; {entry.meanwhile}"
    return Answer(entry, given, value, "recognised", line)


def variable_names(entry: Entry) -> tuple[str, ...]:
    """The names a variable goes by: the guide's, and ours with and without SGLANG_ in it."""
    return (entry.name, f"V4MESH_{entry.name}", f"V4MESH_{entry.name.removeprefix('SGLANG_')}")


def read_flags(flags: Mapping[str, str | bool | None]) -> tuple[list[Answer], list[Problem]]:
    """Answers to the flags given (keys: `Entry.field`), and a problem per value that is refused."""
    given = [(e, e.name, flags.get(e.field)) for e in FLAGS]
    return _read([(e, name, "" if v is True else str(v)) for e, name, v in given if v not in (None, False)])


def read_variables(environ: Mapping[str, str]) -> tuple[list[Answer], list[Problem]]:
    """Answers to the guide's variables that are set; empty counts as not set."""
    given = []
    for entry in VARIABLES:
        names = [n for n in variable_names(entry) if environ.get(n)]
        if names:
            given.append((entry, names[0], environ[names[0]]))
    return _read(given)


def _read(given: Sequence[tuple[Entry, str, str]]) -> tuple[list[Answer], list[Problem]]:
    answers, problems = [], []
    for entry, name, text in given:
        try:
            answers.append(answer(entry, text, name))
        except ValueError as e:
            shown = f"{name} {text}" if name.startswith("--") else f"{name}={text}"
            problems.append(Problem("FLAG", Exit.USAGE, f"{shown}: {e}"))
    return answers, problems


def folders_of_caches(environ: Mapping[str, str]) -> dict[str, str]:
    """The guide's folders by the worker's option: what `precache` must share with `serve`."""
    wanted = ("worker.kernel_cache", "worker.autotune_cache")
    return {a.entry.ours.partition(".")[2]: a.value for a in read_variables(environ)[0] if a.entry.ours in wanted}


def check_layout(values: Mapping[str, Any]) -> list[Problem]:
    """The rules between sizes: ep and moe_dp divide the world, which is tp x attention_dp x attention_cp."""
    tp, dp, cp = (int(values.get(k, 1)) for k in ("tp", "attention_dp_size", "attention_cp_size"))
    world = tp * dp * cp
    problems = []
    for name in ("ep_size", "moe_dp_size"):
        size = int(values.get(name, 1))
        if world % size:
            divisors = ", ".join(str(d) for d in range(1, world + 1) if world % d == 0)
            fact = (
                f"--{name.replace('_', '-')} {size} does not divide the {world} ranks of --tp {tp} x "
                f"--attention-dp-size {dp} x --attention-cp-size {cp}"
            )
            problems.append(Problem("LAYOUT", Exit.CONFIG, fact, f"one of {divisors}"))
    return problems
