"""What v4-nano can do and what its parts are worth: answers, ablations, drafts, rounding, agreement with transformers.

Answers are judged word for word (`tools.nano.exam`). The table of quantisation compares the shipped weights in exact
arithmetic with the published run-time rounding; the twin trained without rounding is in the model card. Needs the test
extra (transformers). Under three minutes on two free cores; `--long` adds lists far beyond the trained length.
"""

import argparse
import random
import time
from collections.abc import Sequence as Many
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks._reference import Reference
from benchmarks._student import ABLATIONS, Student
from gateway.text.tokenizer import Tokenizer
from meshkit.types import SamplingParams
from tools.nano import lookups
from tools.nano.corpus import Corpus, Sources
from tools.nano.document import Document, tokenize
from tools.nano.exam import Marks, Paper, papers
from worker_svc.checkpoint.loader import load_checkpoint
from worker_svc.checkpoint.quant_choice import Numerics
from worker_svc.executor import CpuExecutor
from worker_svc.solo import Sequence, pages_for, steps

TITLE = "v4-nano: exact answers, ablations, draft acceptance, rounding, agreement with transformers"
MODEL = Path(__file__).parent.parent / "meshkit" / "models" / "v4-nano"
ROUNDED = Numerics(activations="fp8", kv="fp8_e4m3", indexer="fp4")
ABLATED = ("pairs_32", "recall_far", "recall_blind")
STORIES, STORY_TOKENS, HELD_TOKENS = 3, 160, 1024
HELD_SEED = 9999
LONG_LISTS, MAX_TOKENS = (300, 700, 1200, 3200), 32768
Metrics = dict[str, float | int | str]


def run(args: list[str]) -> Metrics:
    """Print the tables; see the keys of the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks nano_eval", description=TITLE)
    parser.add_argument("--each", type=int, default=6, help="documents of each kind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--text", type=Path, help="natural text, for held-out prose")
    parser.add_argument("--long", action="store_true", help="lists of 4,000 to 30,000 tokens as well")
    options = parser.parse_args(args)
    torch.set_num_threads(options.threads)
    tokenizer, student = Tokenizer.load(MODEL), Student(MODEL)
    sheets = papers(tokenizer, options.each, Sources.load(None))
    metrics = answers(student, sheets)
    metrics |= stories(student, tokenizer)
    metrics |= ablations(sheets)
    held = held_out(tokenizer)
    metrics |= rounding(student, sheets, held)
    metrics |= {"ce_diff_transformers_nats": transformers_difference(student, held)}
    if options.text:
        metrics |= prose(student, tokenizer, options.text)
    if options.long:
        metrics |= long_lists(tokenizer)
    return metrics


def answers(student: Student, sheets: Many[Paper]) -> Metrics:
    """Exact answers and accepted drafts by kind."""
    total, found, tokens, began = Marks(), {}, 0, time.perf_counter()
    print(f"{'kind':16}{'answers':>9}{'exact':>8}{'drafts accepted':>17}")
    for paper in sheets:
        marks = student.marks(paper, drafts=True)
        tokens += sum(len(document.ids) for document in paper.documents)
        found[f"exact_{paper.kind}"] = round(marks.rate, 4)
        total = total.plus(marks)
        print(f"{paper.kind:16}{marks.answers:9}{marks.rate:8.3f}{marks.acceptance:17.3f}")
    print(f"{'all':16}{total.answers:9}{total.rate:8.3f}{total.acceptance:17.3f}")
    speed = round(tokens / (time.perf_counter() - began))
    return {
        "answers_exact": round(total.rate, 4),
        "mtp_accept_answers": round(total.acceptance, 4),
        "cpu_prefill_and_draft_tokens_per_s": speed,
        **found,
    }


def stories(student: Student, tokenizer: Tokenizer) -> Metrics:
    """Greedy stories: do they tell what was asked, and how many drafts would have been right."""
    corpus = Corpus(Sources.load(None), HELD_SEED)
    executor = CpuExecutor.load(MODEL, slots=1, pages=4, tails=0)
    drafted = accepted = told = written = 0
    seconds = 0.0
    for _ in range(STORIES):
        document = tokenize(corpus.draw_kind("story"), tokenizer)
        prompt = document.ids[: document.answers[-1][0]].tolist()
        params, pages = SamplingParams(temperature=0.0, max_tokens=STORY_TOKENS), pages_for(len(prompt) + STORY_TOKENS)
        sequence = Sequence(slot=0, pages=pages, ids=list(prompt), params=params, seed=0)
        began = time.perf_counter()
        for _ in steps(executor, sequence):
            if sequence.drawn and sequence.drawn[-1] in executor.info.eos_ids:
                break
        seconds += time.perf_counter() - began
        told, written = told + int(sequence.drawn[-1] in executor.info.eos_ids), written + len(sequence.drawn)
        ids = torch.tensor(sequence.ids)
        guesses = student_guesses(student, ids)
        accepted += int((guesses[len(prompt) - 1 : -1] == ids[len(prompt) + 1 :]).sum())
        drafted += len(ids) - len(prompt) - 1
    rate = accepted / max(1, drafted)
    print(f"greedy stories: {told} of {STORIES} come to an end, {rate:.3f} of {drafted} drafts accepted")
    return {"mtp_accept_greedy": round(rate, 4), "cpu_decode_tokens_per_s": round(written / seconds, 1)}


def student_guesses(student: Student, ids: Tensor) -> Tensor:
    """The draft layer's first choices over a sequence: at p, for the token p + 2."""
    student.logits(ids)
    return student.draft_logits(ids).argmax(-1)


def ablations(sheets: Many[Paper]) -> Metrics:
    """Exact answers with parts taken away."""
    chosen = [paper for paper in sheets if paper.kind in ABLATED]
    metrics: Metrics = {}
    print(f"{'ablation':16}" + "".join(f"{paper.kind:>14}" for paper in chosen))
    for ablation in ABLATIONS:
        student = Student(MODEL)
        ablation.apply(student)
        rates = {paper.kind: student.marks(paper).rate for paper in chosen}
        metrics |= {f"{ablation.name}_{kind}": round(rate, 4) for kind, rate in rates.items()}
        print(f"{ablation.name:16}" + "".join(f"{rate:14.3f}" for rate in rates.values()))
    return metrics


def held_out(tokenizer: Tokenizer) -> Tensor:
    """1,024 tokens of generated documents from a seed that training did not use."""
    corpus = Corpus(Sources.load(None), HELD_SEED)
    ids: list[int] = []
    while len(ids) < HELD_TOKENS:
        ids += tokenize(corpus.draw(0.5), tokenizer).ids.tolist()
    return torch.tensor(ids[:HELD_TOKENS])


def rounding(student: Student, sheets: Many[Paper], held: Tensor) -> Metrics:
    """The shipped weights with the run-time rounding of the published kernels, against exact arithmetic."""
    rounded = Student(MODEL, numerics=ROUNDED)
    exact_logits, rounded_logits = student.logits(held), rounded.logits(held)
    exact, other = exact_logits.log_softmax(-1), rounded_logits.log_softmax(-1)
    divergence = float((exact.exp() * (exact - other)).sum(-1).mean())
    same = float((exact.argmax(-1) == other.argmax(-1)).float().mean())
    total = Marks()
    for paper in sheets:
        total = total.plus(rounded.marks(paper))
    losses = [nats(logits, held) for logits in (exact_logits, rounded_logits)]
    print(f"exact: CE {losses[0]:.4f}; rounded: CE {losses[1]:.4f}, KL {divergence:.5f}, first choice {same:.3f}")
    print(f"rounded: {total.rate:.3f} of answers exact")
    return {
        "ce_exact_nats": round(losses[0], 4),
        "ce_rounded_nats": round(losses[1], 4),
        "kl_rounded_nats": round(divergence, 5),
        "top1_rounded": round(same, 4),
        "answers_exact_rounded": round(total.rate, 4),
    }


def nats(logits: Tensor, ids: Tensor) -> float:
    """Mean cross-entropy of a sequence."""
    return float(cross_entropy(logits[:-1].double(), ids[1:]))


def transformers_difference(student: Student, held: Tensor) -> float:
    """Difference in cross-entropy to transformers with the same weights, both FP32."""
    reference = Reference(load_checkpoint(MODEL))
    ours, theirs = nats(student.logits(held), held), nats(reference.logits(held), held)
    print(f"cross-entropy {ours:.6f}, transformers {theirs:.6f} nats")
    return abs(ours - theirs)


def prose(student: Student, tokenizer: Tokenizer, folder: Path) -> Metrics:
    """Held-out prose: cross-entropy and draft acceptance, teacher forced."""
    metrics: Metrics = {}
    for name in ("austen", "web"):
        text = (folder / f"{name}_held.txt").read_text()[20_000:40_000]
        ids = torch.tensor(tokenize(Document(kind="", prose=text), tokenizer).ids[:HELD_TOKENS].tolist())
        logits = student.logits(ids)
        guesses = student.draft_logits(ids).argmax(-1)
        agreed = float((guesses[:-1] == logits.argmax(-1)[1:-1]).float().mean())
        metrics |= {f"ce_{name}_held_nats": round(nats(logits, ids), 4), f"mtp_accept_{name}_held": round(agreed, 4)}
        print(f"{name}, held out: CE {nats(logits, ids):.3f} nats per token, {agreed:.3f} of drafts accepted")
    return metrics


def long_lists(tokenizer: Tokenizer) -> Metrics:
    """Lists of pairs far beyond the 2,048 tokens of training."""
    metrics: Metrics = {}
    student = Student(MODEL, max_tokens=MAX_TOKENS)
    for pairs in LONG_LISTS:
        rng = random.Random(HELD_SEED + pairs)
        document = tokenize(lookups.pairs(rng, lookups.INVENTED, pairs, 8), tokenizer)
        assert len(document.ids) <= MAX_TOKENS, len(document.ids)
        marks = student.marks(Paper("long", (document,)))
        metrics[f"exact_pairs_at_{len(document.ids)}_tokens"] = round(marks.rate, 3)
        print(f"{pairs} pairs, {len(document.ids)} tokens: {marks.exact} of {marks.answers} exact", flush=True)
    return metrics
