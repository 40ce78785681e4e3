"""`lora check` says of a model, tensor by tensor, whether it is its base with an adapter: faults made on purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import mergepipe
from mergepipe.errors import CorruptError, MismatchError, UnsupportedError
from support.command_line import run_command
from support.model_folders import PREFIX, write_adapter, write_model

F32 = NDArray[np.float32]
Tensors = dict[str, F32]
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
SHAPES = {"self_attn.q_proj": (64, 64), "mlp.up_proj": (96, 64)}
MODULES = [f"model.layers.{layer}.{name}" for layer in range(4) for name in SHAPES]
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": BF16}
RANK, SCALE = 4, 2.0


@dataclass(frozen=True)
class Case:
    """A base in its dtype, an adapter, and what applying it gives in float64."""

    root: Path
    dtype: np.dtype[Any]
    base: Mapping[str, NDArray[Any]]
    deltas: Mapping[str, NDArray[np.float64]]

    def applied(self) -> dict[str, NDArray[np.float64]]:
        """Return the base with every delta."""
        tensors = {name: values.astype(np.float64) for name, values in self.base.items()}
        for name, delta in self.deltas.items():
            tensors[name] = tensors[name] + delta
        return tensors

    def report(self, tensors: Mapping[str, NDArray[Any]], dtype: np.dtype[Any] | None = None) -> Any:
        """Write a model, and check it."""
        stored = {name: values.astype(dtype or self.dtype) for name, values in tensors.items()}
        write_model(self.root / "model", stored, CONFIG)
        return mergepipe.check_lora(self.root / "base", self.root / "adapter", self.root / "model", threads=1)


def case_of(root: Path, dtype: str, size: float = 0.02, **options: object) -> Case:
    """Write a base of normal values, and an adapter whose deltas are about `size` of them."""
    random = np.random.default_rng(7)

    def values(*shape: int) -> F32:
        return random.standard_normal(shape).astype(np.float32)

    weights = {f"{module}.weight": values(*SHAPES[module.split(".", 3)[3]]) for module in MODULES}
    weights |= {EMBEDDING: values(80, 64), HEAD: values(80, 64), NORM: values(64)}
    base = {name: tensor.astype(DTYPES[dtype]) for name, tensor in weights.items()}
    factors: Tensors = {}
    deltas = {}
    for module in MODULES:
        rows, columns = SHAPES[module.split(".", 3)[3]]
        down = values(RANK, columns)
        up = (size / (SCALE * np.sqrt(RANK))) * values(rows, RANK)
        factors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up.astype(np.float32)}
        deltas[f"{module}.weight"] = SCALE * (up.astype(np.float64) @ down)
    write_model(root / "base", base, CONFIG)
    write_adapter(root / "adapter", factors, **options)
    return Case(root, DTYPES[dtype], base, deltas)


def verdicts(report: Any) -> dict[str, str]:
    """Return what was found of each tensor."""
    return {tensor.name: str(tensor.verdict) for tensor in (*report.tensors, *report.others)}


def row(report: Any, name: str) -> Any:
    return next(tensor for tensor in (*report.tensors, *report.others) if tensor.name == name)


Q0, Q1, Q2 = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3))
UP0 = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.5, 0.02, 0.002])
def test_check_lora__tells_an_applied_adapter_from_its_base(tmp_path: Path, dtype: str, size: float) -> None:
    """Down to deltas of a quarter of a step of bfloat16, of which rounding takes most."""
    case = case_of(tmp_path, dtype, size)
    report = case.report(case.applied())
    assert (report.is_applied, set(verdicts(report).values())) == (True, {"applied"})
    assert {tensor.found_scale for tensor in report.tensors} == {1.0}
    lost = np.mean([tensor.rounded_share for tensor in report.tensors])
    base, exact = case.base[Q0], case.applied()[Q0]
    expected = np.mean(exact.astype(np.float32).astype(case.dtype) == base)
    assert abs(row(report, Q0).rounded_share - expected) < 1e-3
    assert lost < 0.01 if dtype == "float32" else lost > (0.5 if size < 0.01 else 0.0)
    absent = case.report(case.base)
    assert (absent.is_applied, set(verdicts(absent).values())) == (False, {"not applied"})
    assert {tensor.found_scale for tensor in absent.tensors} == {0.0}


def test_check_lora__cannot_tell_what_rounding_takes_as_a_whole(tmp_path: Path) -> None:
    case = case_of(tmp_path, "bfloat16", 1e-15)
    report = case.report(case.applied())
    assert (report.is_applied, set(verdicts(report).values())) == (None, {"cannot be told"})
    assert row(report, Q0).detail == "every change is less than half a step of BF16"
    assert row(report, Q0).rounded_share == 1.0


@pytest.mark.parametrize("size", [0.5, 0.005, 0.001])
def test_check_lora__knows_from_its_record_that_a_model_was_rounded_stochastically(tmp_path: Path, size: float) -> None:
    case_of(tmp_path, "bfloat16", size)
    out = tmp_path / "out"
    mergepipe.apply_lora(tmp_path / "base", [tmp_path / "adapter"], out, rounding="stochastic", catalog=False)
    report = mergepipe.check_lora(tmp_path / "base", tmp_path / "adapter", out)
    assert (report.is_applied, set(verdicts(report).values())) == (True, {"applied"})
    twice = tmp_path / "twice"
    mergepipe.apply_lora(out, [tmp_path / "adapter"], twice, rounding="stochastic", catalog=False)
    report = mergepipe.check_lora(tmp_path / "base", tmp_path / "adapter", twice)
    assert (report.is_applied, set(verdicts(report).values())) == (False, {"at another scale"})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.5, 0.02, 0.005])
@pytest.mark.parametrize("factor", [2.0, 0.5, -1.0, 0.25])
def test_check_lora__states_the_scale_that_was_used(tmp_path: Path, dtype: str, size: float, factor: float) -> None:
    case = case_of(tmp_path, dtype, size)
    tensors = dict(case.applied())
    tensors[Q0] = case.base[Q0] + factor * case.deltas[Q0]
    report = case.report(tensors)
    assert report.is_applied is False
    assert {name for name, verdict in verdicts(report).items() if verdict != "applied"} == {Q0}
    assert str(row(report, Q0).verdict) == "at another scale"
    loss = 0.15 if dtype == "bfloat16" and size < 0.01 else 0.02
    assert abs(row(report, Q0).found_scale - factor) < loss * max(abs(factor), 1)
    reasons = {2.0: "applied twice", -1.0: "subtracted", 0.5: "without its scale"}
    if loss == 0.02:
        assert row(report, Q0).detail == reasons.get(factor, "")


@pytest.mark.parametrize("dtype", DTYPES)
def test_check_lora__of_an_adapter_that_was_applied_twice_in_the_model_dtype(tmp_path: Path, dtype: str) -> None:
    case = case_of(tmp_path, dtype)
    mergepipe.apply_lora(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "once", catalog=False)
    mergepipe.apply_lora(tmp_path / "once", [tmp_path / "adapter"], tmp_path / "twice", catalog=False)
    report = mergepipe.check_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "twice", threads=1)
    assert set(verdicts(report).values()) == {"at another scale"}
    assert {tensor.detail for tensor in report.tensors} == {"applied twice"}
    assert mergepipe.check_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "once").is_applied
    assert case.deltas.keys() == {tensor.name for tensor in report.tensors}


def test_check_lora__names_the_scale_of_a_plain_lora_for_an_rslora(tmp_path: Path) -> None:
    case = case_of(tmp_path, "float32", use_rslora=True)
    report = case.report(case.applied())
    assert {tensor.detail for tensor in report.tensors} == {"scaled by alpha / r, and rsLoRA is alpha / sqrt(r)"}
    assert {round(tensor.found_scale, 4) for tensor in report.tensors} == {0.5}
    write_adapter(tmp_path / "plain", {})
    config = (tmp_path / "plain" / "adapter_config.json").read_text()
    (tmp_path / "adapter" / "adapter_config.json").write_text(config)
    tensors = {name: case.base[name] + 2 * delta for name, delta in case.deltas.items()}
    report = case.report({**case.base, **tensors})
    assert {round(tensor.found_scale, 4) for tensor in report.tensors} == {2.0}


Fault = Callable[[Case, dict[str, NDArray[np.float64]]], None]


def layers_swapped(case: Case, tensors: dict[str, NDArray[np.float64]]) -> None:
    tensors[Q0] = case.base[Q0] + case.deltas[Q1]
    tensors[Q1] = case.base[Q1] + case.deltas[Q0]


def transposed(case: Case, tensors: dict[str, NDArray[np.float64]]) -> None:
    tensors[Q0] = case.base[Q0] + case.deltas[Q0].T


def half_of_the_modules(case: Case, tensors: dict[str, NDArray[np.float64]]) -> None:
    tensors |= {name: case.base[name].astype(np.float64) for name in case.deltas if ".up_proj" in name}


def half_of_the_rows(case: Case, tensors: dict[str, NDArray[np.float64]]) -> None:
    tensors[UP0] = tensors[UP0].copy()
    tensors[UP0][:48] = case.base[UP0][:48]


def changed_norm(case: Case, tensors: dict[str, NDArray[np.float64]]) -> None:
    tensors[NORM] = case.base[NORM] * 1.5


def head_missing(_: Case, tensors: dict[str, NDArray[np.float64]]) -> None:
    del tensors[HEAD]


def other_shape(case: Case, tensors: dict[str, NDArray[np.float64]]) -> None:
    tensors[EMBEDDING] = case.base[EMBEDDING][:72].astype(np.float64)


def not_finite(_: Case, tensors: dict[str, NDArray[np.float64]]) -> None:
    tensors[Q2] = tensors[Q2].copy()
    tensors[Q2][3, 5] = np.nan


def change_in_a_module_without_one(case: Case, tensors: dict[str, NDArray[np.float64]]) -> None:
    tensors[Q0] = case.base[Q0].astype(np.float64)
    tensors[HEAD] = case.base[HEAD].astype(np.float64)
    tensors[HEAD][:64] = -tensors[HEAD][:64]


FAULTS: dict[str, tuple[Fault, dict[str, tuple[str, str]]]] = {
    "layers swapped": (
        layers_swapped, {Q0: ("another change", f"that of {Q1}"), Q1: ("another change", f"that of {Q0}")},
    ),
    "transposed": (transposed, {Q0: ("another change", "its own change, transposed")}),
    "half of the modules": (
        half_of_the_modules,
        {f"{module}.weight": ("not applied", "") for module in MODULES if module.endswith("up_proj")},
    ),
    "half of the rows": (half_of_the_rows, {UP0: ("partly applied", "")}),
    "changed norm": (changed_norm, {NORM: ("neither base nor applied", "64 elements of 64 differ")}),
    "head missing": (head_missing, {HEAD: ("not in the model", "")}),
    "other shape": (other_shape, {EMBEDDING: ("neither base nor applied", "of shape [72, 64], and not [80, 64]")}),
    "not finite": (not_finite, {Q2: ("infinities or NaN", "1 value of 4096")}),
    "elsewhere": (
        change_in_a_module_without_one,
        {Q0: ("not applied", ""), HEAD: ("neither base nor applied", "4096 elements of 5120 differ")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_check_lora__names_the_tensor_and_the_fault(tmp_path: Path, fault: str, dtype: str) -> None:
    make, expected = FAULTS[fault]
    case = case_of(tmp_path, dtype, 0.1)
    tensors = dict(case.applied())
    make(case, tensors)
    report = case.report(tensors)
    found = {tensor.name: (str(tensor.verdict), tensor.detail) for tensor in (*report.tensors, *report.others)}
    wrong = {name: verdict for name, verdict in found.items() if verdict[0] != "applied"}
    if fault == "half of the rows":
        assert wrong.keys() == expected.keys()
        share, _, rest = wrong[UP0][1].partition(" % ")
        assert (wrong[UP0][0], rest) == ("partly applied", "of its elements, the rest not")
        assert abs(float(share) - 50) < 2
    else:
        assert wrong == expected
    assert report.is_applied is False
    rows = report.unchanged_tensors + len(report.others) + len(report.tensors)
    assert rows == len(case.base)


def test_check_lora__of_another_base_says_so(tmp_path: Path) -> None:
    case = case_of(tmp_path, "float32")
    other = np.random.default_rng(1)
    tensors = {name: t + 0.1 * other.standard_normal(t.shape) for name, t in case.applied().items()}
    report = case.report(tensors)
    assert report.verdict.startswith("made of another base: 8 neither base nor applied; 3 tensors beside them")
    assert report.unchanged_tensors == 0


def test_check_lora__of_another_adapter_finds_neither(tmp_path: Path) -> None:
    case = case_of(tmp_path, "float32")
    other = np.random.default_rng(2)
    tensors = dict(case.applied())
    for name, delta in case.deltas.items():
        up, down = other.standard_normal((delta.shape[0], 4)), other.standard_normal((4, delta.shape[1]))
        tensors[name] = case.base[name] + 0.01 * (up @ down)
    report = case.report(tensors)
    assert verdicts(report) == dict.fromkeys(case.deltas, "neither base nor applied")
    assert report.verdict == "not as the adapter says: 8 neither base nor applied"


def test_check_lora__takes_the_roundings_of_a_merge_in_bfloat16(tmp_path: Path) -> None:
    """The product and its scale may be rounded too, as where factors are in bfloat16; the sum, by chance."""
    case = case_of(tmp_path, "bfloat16")
    tensors = dict(case.applied())
    for name in case.deltas:
        product = (case.deltas[name] / SCALE).astype(np.float32).astype(BF16)
        delta = (SCALE * product.astype(np.float32)).astype(BF16)
        tensors[name] = case.base[name].astype(np.float64) + delta.astype(np.float64)
    assert case.report(tensors).is_applied
    exact = {name: tensor.astype(np.float32) for name, tensor in case.applied().items()}
    chance = np.random.default_rng(4)
    by_chance = {}
    for name, values in exact.items():
        noise = chance.integers(0, 1 << 16, values.shape, dtype=np.uint32)
        bits = (values.view(np.uint32) + noise) & np.uint32(0xFFFF0000)
        by_chance[name] = bits.view(np.float32)
    report = case.report(by_chance)
    assert set(verdicts(report).values()) == {"applied"}
    assert {tensor.detail.partition(" off by ")[2] for tensor in report.tensors} == {"more than rounding to nearest"}


def test_check_lora__takes_a_base_that_was_rounded_before_and_a_model_that_was_widened_after(tmp_path: Path) -> None:
    case = case_of(tmp_path, "float32", 0.1)
    rounded = {name: tensor.astype(BF16).astype(np.float64) for name, tensor in case.base.items()}
    tensors = {name: tensor + case.deltas.get(name, 0.0) for name, tensor in rounded.items()}
    report = case.report(tensors, BF16)
    assert (report.is_applied, report.others) == (True, ())
    narrow = case_of(tmp_path, "bfloat16", 0.1)
    wide = {name: tensor.astype(BF16).astype(np.float32) for name, tensor in narrow.applied().items()}
    report = narrow.report(wide, DTYPES["float32"])
    assert (report.is_applied, report.others) == (True, ())
    assert narrow.report(narrow.applied(), DTYPES["float32"]).is_applied


def test_check_lora__compares_saved_modules_and_trained_biases(tmp_path: Path) -> None:
    case = case_of(tmp_path, "float32")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    saved = {HEAD: case.base[HEAD] + 0.5, NORM: case.base[NORM] * 2}
    save_file({**load_file(path), **{PREFIX + name: tensor for name, tensor in saved.items()}}, path)
    tensors = {**case.applied(), **saved}
    assert case.report(tensors).is_applied
    report = case.report({**tensors, HEAD: case.base[HEAD]})
    assert {name for name, verdict in verdicts(report).items() if verdict != "applied"} == {HEAD}
    assert str(row(report, HEAD).verdict) == "not applied"


def test_check_lora__without_a_model_checks_names_shapes_and_values(tmp_path: Path) -> None:
    case = case_of(tmp_path, "float32")
    report = mergepipe.check_lora(tmp_path / "base", tmp_path / "adapter")
    assert (report.is_applied, report.verdict) == (True, "fits: 8 of 8 tensors")
    assert {(tensor.rank, tensor.scale) for tensor in report.tensors} == {(4, 2.0)}
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    factors = load_file(path)
    stem = PREFIX + MODULES[0]
    damaged = {**factors, f"{stem}.lora_A.weight": np.full_like(factors[f"{stem}.lora_A.weight"], np.nan)}
    zeros = f"{PREFIX}{MODULES[1]}.lora_B.weight"
    save_file({**damaged, zeros: np.zeros_like(damaged[zeros])}, path)
    report = mergepipe.check_lora(tmp_path / "base", tmp_path / "adapter")
    assert report.is_applied is False
    assert verdicts(report)[f"{MODULES[0]}.weight"] == "infinities or NaN"
    assert verdicts(report)[f"{MODULES[1]}.weight"] == "changes nothing"
    with pytest.raises(CorruptError, match="holds infinities or NaN"):
        case.report(case.applied())
    other = {name.replace("layers.0.self_attn", "layers.9.self_attn"): values for name, values in factors.items()}
    save_file(other, path)
    report = mergepipe.check_lora(tmp_path / "base", tmp_path / "adapter")
    assert (report.is_applied, report.verdict) == (None, "does not fit: 7 fits, 1 not in the base")
    assert "model.layers.9.self_attn.q_proj.weight' has no counterpart in the base" in report.notices[0]
    renamed = mergepipe.check_lora(tmp_path / "base", tmp_path / "adapter", adapter_names=("layers.9=layers.0",))
    assert renamed.is_applied
    nothing = {name: values * (0 if "lora_B" in name else 1) for name, values in factors.items()}
    save_file(nothing, path)
    report = mergepipe.check_lora(tmp_path / "base", tmp_path / "adapter")
    assert (report.is_applied, report.verdict) == (None, "nothing to apply: 8 changes nothing")


def test_check_lora__refuses_what_is_no_merged_model_of_the_base(tmp_path: Path) -> None:
    case = case_of(tmp_path, "float32")
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    with pytest.raises(UnsupportedError, match="is an adapter, and a merged model is needed"):
        mergepipe.check_lora(base, adapter, adapter)
    write_model(tmp_path / "other", {"some.weight": np.ones((4, 4), np.float32)}, CONFIG)
    with pytest.raises(MismatchError, match="it has no tensor that the adapter changes, such as"):
        mergepipe.check_lora(base, adapter, tmp_path / "other")
    factor = np.ones((4, 64), np.float32)
    unmerged = {f"{PREFIX}{name}": tensor for name, tensor in case.base.items()}
    write_model(tmp_path / "unmerged", {**unmerged, f"{PREFIX}{MODULES[0]}.lora_A.default.weight": factor}, CONFIG)
    with pytest.raises(UnsupportedError, match="the adapter was saved, and not merged"):
        mergepipe.check_lora(base, adapter, tmp_path / "unmerged")


def test_lora_check__answers_with_its_exit_code(tmp_path: Path) -> None:
    case = case_of(tmp_path, "bfloat16", 0.02)
    names = [str(tmp_path / name) for name in ("base", "adapter", "model")]
    case.report(case.applied())
    ran = run_command(["lora", "check", *names])
    assert (ran.exit_code, ran.out.splitlines()[0].split(maxsplit=1)) == (0, ["verdict", "applied: 8 of 8 tensors"])
    ran = run_command(["lora", "check", *names, "--json"])
    assert (ran.exit_code, ran.json()["is_applied"], len(ran.json()["tensors"])) == (0, True, 8)
    ran = run_command(["lora", "check", names[0], names[1], names[0]])
    assert (ran.exit_code, ran.codes) == (4, [])
    assert ran.out.splitlines()[0].endswith("not applied: 8 not applied")
    assert run_command(["lora", "check", *names[:2], "--quiet"]).out == ""
    case = case_of(tmp_path, "bfloat16", 1e-15)
    case.report(case.applied())
    ran = run_command(["lora", "check", *names])
    assert (ran.exit_code, ran.out.splitlines()[0].split(maxsplit=1)[1]) == (5, "cannot be told: 8 cannot be told")


# --- experts, and codes ---


STACK = "model.layers.0.mlp.experts.gate_up_proj"
N_EXPERTS, WIDTH, INNER = 4, 16, 24


def expert_case(root: Path) -> tuple[Tensors, dict[str, NDArray[np.float64]]]:
    """Write a base of fused experts, and an adapter of the stack; return what applying it gives, and its deltas."""
    random = np.random.default_rng(3)
    shape = (N_EXPERTS, 2 * INNER, WIDTH)
    stack = random.standard_normal(shape).astype(np.float32)
    down_stack = random.standard_normal((N_EXPERTS, WIDTH, INNER)).astype(np.float32)
    write_model(root / "base", {STACK: stack, STACK.replace("gate_up", "down"): down_stack})
    down_ERN = random.standard_normal((N_EXPERTS, RANK, WIDTH)).astype(np.float32)
    up_MRE = 0.1 * random.standard_normal((2 * INNER, RANK, N_EXPERTS)).astype(np.float32)
    up_MRE = up_MRE.astype(np.float32)
    module = STACK.rpartition(".")[0]
    factors = {
        f"{module}.lora_A.weight": down_ERN.reshape(-1, WIDTH),
        f"{module}.lora_B.weight": up_MRE.reshape(len(up_MRE), -1),
    }
    write_adapter(root / "adapter", factors, target_parameters=["mlp.experts.gate_up_proj"])
    deltas_EMN = SCALE * np.einsum("mre,ern->emn", up_MRE.astype(np.float64), down_ERN)
    return {STACK.replace("gate_up", "down"): down_stack, STACK: stack}, {STACK: deltas_EMN}


def single_experts(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Store experts one by one, as transformers 4 does."""
    made: dict[str, NDArray[Any]] = {}
    for name, stack in tensors.items():
        module, _, leaf = name.rpartition(".")
        for expert, values in enumerate(stack):
            parts = {"down_proj": values}
            if leaf == "gate_up_proj":
                parts = {"gate_proj": values[:INNER], "up_proj": values[INNER:]}
            made |= {f"{module}.{expert}.{role}.weight": part for role, part in parts.items()}
    return made


@pytest.mark.parametrize("layout", ["fused", "single"])
def test_check_lora__names_the_experts_that_are_not_as_they_should_be(tmp_path: Path, layout: str) -> None:
    base, deltas = expert_case(tmp_path)
    stored = single_experts if layout == "single" else dict

    def found(stack: NDArray[np.float64]) -> tuple[bool | None, str, str]:
        tensors = stored({**base, STACK: stack.astype(np.float32)})
        write_model(tmp_path / "model", tensors)
        report = mergepipe.check_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "model", threads=1)
        (tensor,) = report.tensors
        return report.is_applied, str(tensor.verdict), tensor.detail

    whole = base[STACK] + deltas[STACK]
    assert found(whole) == (True, "applied", "")
    one = whole.copy()
    one[2] = base[STACK][2]
    assert found(one) == (False, "partly applied", "of 4 experts: 3 applied, 1 not applied")
    swapped = whole.copy()
    swapped[0] = base[STACK][0] + deltas[STACK][3]
    assert found(swapped) == (False, "partly applied", "of 4 experts: 1 another change, 3 applied")
    moved = base[STACK] + np.roll(deltas[STACK], 1, axis=0)
    assert found(moved)[:2] == (False, "another change")
    exchanged = whole[[1, 0, 2, 3]]  # the file of an expert in the place of another's
    assert found(exchanged) == (False, "partly applied", "of 4 experts: 2 neither base nor applied, 2 applied")


def test_check_lora__reads_a_quantised_base_as_numbers_and_cannot_tell_of_a_quantised_model(tmp_path: Path) -> None:
    case = case_of(tmp_path, "bfloat16", 0.5)
    codes: dict[str, NDArray[Any]] = {}
    numbers = {}
    for name, tensor in case.base.items():
        numbers[name] = tensor.astype(np.float32)
        if name in case.deltas:
            coded = tensor.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
            codes |= {name: coded, f"{name}_scale_inv": np.ones((1, 1), np.float32)}
            numbers[name] = coded.astype(np.float32)
        else:
            codes[name] = tensor
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
    write_model(tmp_path / "base", codes, {**CONFIG, "quantization_config": method})
    applied = {name: tensor + case.deltas.get(name, 0.0) for name, tensor in numbers.items()}
    report = case.report(applied)
    assert (report.is_applied, report.others) == (True, ())
    assert case.report(numbers).verdict == "not applied: 8 not applied"
    report = mergepipe.check_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "base")
    assert report.is_applied is None
    assert row(report, Q0).detail == "the model is quantised; its difference is about 0 times the change"


def test_check_lora__of_a_dora_without_its_magnitudes_says_so(tmp_path: Path) -> None:
    case = case_of(tmp_path, "float32", 0.1, use_dora=True)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    factors = load_file(path)
    applied = dict(case.applied())
    for module in MODULES:
        sums = applied[f"{module}.weight"]
        magnitudes = np.linalg.norm(case.base[f"{module}.weight"], axis=1) * 1.25
        factors[f"{PREFIX}{module}.lora_magnitude_vector"] = magnitudes.astype(np.float32)
        applied[f"{module}.weight"] = sums * (magnitudes / np.linalg.norm(sums, axis=1))[:, None]
    save_file(factors, path)
    assert case.report(applied).is_applied
    report = case.report(case.applied())
    assert {tensor.detail for tensor in report.tensors} == {"its own delta, without the magnitudes"}
    assert set(verdicts(report).values()) == {"another change"}


@pytest.mark.parametrize("n_rows", [80, 96])
def test_check_lora__compares_an_embedding_that_was_resized(tmp_path: Path, n_rows: int) -> None:
    case = case_of(tmp_path, "float32")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    table = np.random.default_rng(9).standard_normal((96, 64)).astype(np.float32)
    resized = {EMBEDDING: table, HEAD: table + 1}
    save_file({**load_file(path), **{PREFIX + name: values for name, values in resized.items()}}, path)
    report = case.report({**case.applied(), **{name: values[:n_rows] for name, values in resized.items()}})
    assert report.is_applied is (n_rows == 96)
    wanted = ("applied", "") if n_rows == 96 else ("not applied", "of shape [80, 64], and not [96, 64]")
    assert (str(row(report, HEAD).verdict), row(report, HEAD).detail) == wanted


def test_check_lora__is_the_same_whatever_the_threads_and_reads_each_byte_once(tmp_path: Path) -> None:
    case = case_of(tmp_path, "float32")
    one = case.report(case.applied())
    many = mergepipe.check_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "model", threads=4)
    assert (one.tensors, one.unchanged_tensors) == (many.tensors, many.unchanged_tensors)
    stored = [tmp_path / "base" / "model.safetensors", tmp_path / "model" / "model.safetensors"]
    stored.append(tmp_path / "adapter" / "adapter_model.safetensors")
    pages = 4096 * 2 * (2 * len(case.base) + 2 * len(MODULES) + 6)
    assert one.read_bytes <= sum(path.stat().st_size for path in stored) + pages


def test_check_lora__compares_a_head_that_the_model_stores_beside_the_embedding_it_is_tied_to(tmp_path: Path) -> None:
    case = case_of(tmp_path, "float32")
    tied = {**CONFIG, "tie_word_embeddings": True}
    base = {name: values for name, values in case.base.items() if name != HEAD}
    write_model(tmp_path / "base", base, tied)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    factors = {name.removeprefix(PREFIX): values for name, values in load_file(path).items()}
    table = case.base[EMBEDDING] * 2
    write_adapter(tmp_path / "adapter", {**factors, EMBEDDING: table}, ensure_weight_tying=True)
    applied = {name: values.astype(np.float32) for name, values in case.applied().items() if name != HEAD}

    def found(heads: Tensors) -> tuple[bool | None, dict[str, str]]:
        write_model(tmp_path / "model", {**applied, EMBEDDING: table, **heads}, tied)
        report = mergepipe.check_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "model", threads=1)
        return report.is_applied, {name: verdict for name, verdict in verdicts(report).items() if verdict != "applied"}

    assert found({}) == (True, {})
    assert found({HEAD: table}) == (True, {})
    assert found({HEAD: case.base[EMBEDDING]}) == (False, {HEAD: "not applied"})


def test_check_lora__takes_a_wide_model_of_which_only_the_first_rows_are_the_base(tmp_path: Path) -> None:
    case = case_of(tmp_path, "bfloat16", 0.1)
    n_rows = (1 << 19) // 64 + 64
    table = np.random.default_rng(5).standard_normal((n_rows, 64)).astype(BF16)
    write_model(tmp_path / "base", {**case.base, EMBEDDING: table}, CONFIG)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    factors = {name.removeprefix(PREFIX): values for name, values in load_file(path).items()}
    rows = np.random.default_rng(6).standard_normal((2, 64)).astype(np.float32)
    trained = {"model.embed_tokens.token_adapter.trainable_tokens_delta": rows}
    indices = [n_rows - 3, n_rows - 1]
    write_adapter(tmp_path / "adapter", {**factors, **trained}, trainable_token_indices=indices)
    changed = table.astype(np.float32)
    changed[indices] = rows
    report = case.report({**case.applied(), EMBEDDING: changed}, DTYPES["float32"])
    assert (report.is_applied, set(verdicts(report).values())) == (True, {"applied"})
