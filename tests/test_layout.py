"""Packages meet in a Y, files import only upwards, and none is too long to hold in the head."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# The reading order: a file imports only from those before it.
ORDER = {
    "author": [
        "names",
        "forms",
        "statements",
        "english",
        "manifest",
        "program",
        "fits",
        "shapes",
        "checks",
        "chips",
        "records",
        "spec",
        "refusals",
        "share",
        "writer",
        "tables",
        "rows",
        "attention",
        "latent",
        "delta",
        "channel_delta",
        "linear",
        "feed_forward",
        "experts",
        "blocks",
        "single",
        "parallel",
        "step",
        "programs",
        "kinds",
        "families.config",
        "families.model",
        "families.rope",
        "families.parts",
        "families.llama",
        "families.mistral",
        "families.qwen",
        "families.gemma",
        "families.olmo2",
        "families.phi3",
        "families.granite",
        "families.smollm3",
        "families.glm4",
        "families.exaone4",
        "families.hunyuan",
        "families.apertus",
        "families.cohere2",
        "families.mixtures",
        "families.mixtral",
        "families.qwen_moe",
        "families.olmoe",
        "families.deepseek",
        "families.gpt_oss",
        "families.llama4",
        "families.qwen3_next",
        "families.kimi_linear",
        "families.minimax",
        "families.ernie4_5_moe",
        "families.glm4_moe",
        "families.granitemoe",
        "families.hunyuan_moe",
        "families.gguf_metadata",
        "families.gguf_keys",
        "families.gguf_dense",
        "families.gguf_mixtures",
        "families.gguf_recurrent",
        "families.gguf_architectures",
        "families.gguf",
        "families.registry",
    ],
    "kernels": [
        "arrays",
        "q8",
        "reference_mixture",
        "reference_norms",
        "reference_recurrent",
        "reference",
        "attention",
        "delta",
        "native.library",
        "native.memory",
        "native.packed",
        "matmul",
        "moe",
        "native.code",
        "native.call",
        "native.chain",
        "table",
    ],
    "tp": [
        "stored",
        "safetensors_file",
        "gguf_file",
        "store_file",
        "checkpoint",
        "tables",
        "authored",
        "rolled",
        "unroll",
        "roll",
        "stretch",
        "interpret",
        "operands",
        "plan",
        "trace",
        "lower",
        "step",
        "channel",
        "door",
        "gather",
        "hosts",
        "launch",
        "slices",
        "views",
        "fitting",
        "bands",
        "receipt",
        "loader",
        "chat_template",
        "gguf_tokenizer",
        "spelling",
        "tokens",
        "source",
        "sample",
        "literal",
        "generation",
        "decoder",
        "ahead",
        "side_by_side",
        "identity",
        "engine",
        "store_plan",
        "store_journal",
        "store_shard",
        "store",
        "columns",
        "costs",
        "matrices",
        "segments",
        "split",
        "outline",
        "weighing",
        "split_json",
        "split_text",
        "unfilled",
        "traced",
        "stages",
        "picture.text",
        "picture.page",
        "show",
        "check.parts",
        "check.beside",
        "check.fault",
        "check.shown",
        "check.executed",
        "check.written",
        "check.wholes",
        "check.bisect",
        "check.widths",
        "check.float_copy",
        "check.transformers_model",
        "check.told",
        "bench.orders",
        "bench.reads",
        "bench.anyfold",
        "bench.llama_cpp",
        "bench.torch_model",
        "bench.memory",
        "bench.q8_file",
        "bench.contender",
        "bench.machine",
        "bench.rivals",
        "bench.turns",
        "bench.measure",
        "bench.facts",
        "bench.report",
        "commands",
        "inspect_command",
        "convert_command",
        "bench_command",
        "check_command",
        "supervise",
        "launch_command",
        "together",
        "cli",
    ],
}

# What a package may import besides itself and the standard library; `tp` and what is above it, all.
IMPORTS = {"author": set(), "kernels": {"jax", "jaxtyping", "numpy"}}

LONGEST = 400  # lines
# The table of the language: declarations one after another, all in one place.
LONGER = {"author/statements.py": 500}

MODULES = [
    (package, ".".join(path.relative_to(ROOT / package).with_suffix("").parts))
    for package in ORDER
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name != "__init__.py"
]
FILES = [p for d in (*ORDER, "scripts") for p in sorted((ROOT / d).rglob("*.py"))]


def named(path):
    return str(path.relative_to(ROOT))


def imported(path):
    """The dotted names that a file imports, wherever it does; a module of a package counts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{named(path)}:{node.lineno}: wanted an absolute import"
            inside = ROOT.joinpath(*node.module.split(".")).is_dir()
            yield from (f"{node.module}.{a.name}" if inside else node.module for a in node.names)


@pytest.mark.parametrize(("package", "module"), MODULES, ids=lambda part: part)
def test_a_file_imports_only_upwards(package, module):
    order = ORDER[package]
    assert module in order, (
        f"{package}.{module} has no place in the reading order: add it to ORDER[{package!r}] in"
        " tests/test_layout.py, after all that it imports and before all that import it"
    )
    path = ROOT.joinpath(package, *module.split(".")).with_suffix(".py")
    own = {m.removeprefix(f"{package}.") for m in imported(path) if m.startswith(f"{package}.")}
    late = sorted(own - set(order[: order.index(module)]))
    assert late == [], f"{named(path)} imports what does not come before it: {', '.join(late)}"


@pytest.mark.parametrize("package", IMPORTS)
def test_a_package_imports_only_its_own(package):
    allowed = {package, *IMPORTS[package], *sys.stdlib_module_names}
    for path in sorted((ROOT / package).rglob("*.py")):
        foreign = sorted({m.split(".")[0] for m in imported(path)} - allowed)
        assert foreign == [], f"{named(path)} imports {', '.join(foreign)}"


def test_the_reading_order_names_each_file_once():
    for package, order in ORDER.items():
        assert len(set(order)) == len(order), package


def test_importing_all_of_author_loads_no_array_library():
    modules = [f"author.{module}" for package, module in MODULES if package == "author"]
    code = (
        f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
        "print(sorted({'jax', 'jaxlib', 'numpy'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (run.stdout.strip(), run.stderr) == ("[]", "")


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_file_is_short(path):
    lines = len(path.read_text().splitlines())
    most = LONGER.get(named(path), LONGEST)
    assert lines <= most, f"{named(path)} has {lines} lines, wanted at most {most}: split it"
