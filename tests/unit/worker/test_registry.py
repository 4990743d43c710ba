"""The backend registry: order, pins, reasons; machine and packages are the test's own."""

import pytest

from worker_svc.ops import registry
from worker_svc.ops.registry import Capability, KernelError


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper machine on which only the packages named in the returned set import."""
    there = {"triton", "deep_gemm"}

    def probe(name):
        package = registry.PACKAGES[name]
        return Capability(name, name in there, "1.0", "" if name in there else "not installed", package.pip)

    monkeypatch.setattr(registry, "probe", probe)
    monkeypatch.setattr(registry, "chip", lambda: 90)
    monkeypatch.setattr(registry, "_pins", {})
    registry.backend.cache_clear()
    yield there
    registry.backend.cache_clear()


@pytest.mark.usefixtures("hopper")
def test_the_first_backend_that_can_run_is_chosen():
    assert registry.backend("fp8_gemm") == "deep_gemm"
    choice = registry.choose("sparse_attention", {})
    assert choice.backend == "triton" and choice.passed_over == {"flash_mla": "not installed"}
    assert choice.pip == "pip install --no-deps sgl-flash-mla==1.0.0"
    assert registry.choose("hyper_boundary", {}).pip == ""


@pytest.mark.usefixtures("hopper")
def test_a_pin_wins_or_says_what_to_install():
    registry.pin(["fp8_gemm=triton"])
    assert registry.backend("fp8_gemm") == "triton" and registry.backend("experts") == "torch"
    with pytest.raises(KernelError, match=r"experts=humming: not installed; pip install humming-kernels==0\.1\.20"):
        registry.pin(["experts=humming"])
    assert registry.backend("fp8_gemm") == "triton", "a refused pin changes nothing"


@pytest.mark.parametrize(
    ("pin", "says"), [("gemm=torch", "no operation 'gemm'"), ("experts=marlin", "humming, torch"), ("experts", "humm")]
)
def test_unknown_pins_are_refused_with_what_there_is(pin, says):
    with pytest.raises(KernelError, match=says):
        registry.parse_pins([pin])


@pytest.mark.usefixtures("hopper")
def test_what_has_one_backend_cannot_be_pinned_to_another():
    assert registry.backend("latent_rows") == "triton"
    with pytest.raises(KernelError, match="has the backends triton"):
        registry.parse_pins(["latent_rows=torch"])


@pytest.mark.usefixtures("hopper")
def test_a_pinned_torch_takes_the_kernel_away():
    assert registry.on_kernel("topk_gate", True) and not registry.on_kernel("topk_gate", False)
    registry.pin(["topk_gate=torch"])
    assert not registry.on_kernel("topk_gate", True)


def test_another_chip_is_told_apart(hopper, monkeypatch):
    monkeypatch.setattr(registry, "chip", lambda: 80)
    assert registry.choose("fp8_gemm", {}).backend == "torch"
    assert "SM 80" in registry.choose("fp8_gemm", {}).passed_over["triton"]
    monkeypatch.setattr(registry, "chip", lambda: 0)
    assert registry.choose("sample", {}).passed_over == {"triton": "no NVIDIA GPU"}
    assert registry.choose("kv_rows", {}).backend == "torch"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ModuleNotFoundError("No module named 'humming'", name="humming"), "not installed"),
        (ModuleNotFoundError("No module named 'jinja2'", name="jinja2"), "needs the Python module jinja2"),
        (ImportError("undefined symbol: _ZN3c10CUDAErrorLogCapture"), "built for another torch"),
        (AssertionError(""), "AssertionError: no message"),
        (OSError("libcuda.so.1: cannot open"), "OSError: libcuda"),
    ],
)
def test_probing_never_raises(error, says, monkeypatch):
    def fail(name):
        raise error

    monkeypatch.setattr(registry.importlib, "import_module", fail)
    monkeypatch.setattr(registry, "_version", lambda distribution: "")
    found = registry.probe.__wrapped__("humming")
    assert not found.available and found.reason.startswith(says)


def test_two_distributions_of_one_module_are_refused(monkeypatch):
    monkeypatch.setattr(registry, "_version", lambda distribution: "1.0")
    assert "both install deep_gemm" in registry.probe.__wrapped__("deep_gemm").reason


@pytest.mark.usefixtures("hopper")
def test_the_table_names_every_operation():
    table = registry.table(["experts=humming"])
    assert [row["op"] for row in table["ops"]] == list(registry.OPS)
    (row,) = (row for row in table["ops"] if row["op"] == "experts")
    assert "pip install humming-kernels" in row["error"]
    assert table["chip"] == 90 and len(table["packages"]) == len(registry.PACKAGES)
