"""``import cuboid`` is light, and what it patches is patched before a script can call it, in every order of imports."""

import ast
import importlib
import sys
import textwrap
from pathlib import Path

import pytest

import cuboid
from launching import run

#: What ``import cuboid`` and the help don't need.
HEAVY = ("torch", "torch._dynamo", "sympy", "numpy", "transformers", "deepspeed", "accelerate", "peft", "matplotlib")
#: ``check()`` in a script: all targets whose modules are imported are replaced, in modules and in classes.
CHECK = """
    import sys
    def check():
        from cuboid_patches import all_patches
        targets = [patch for patch in all_patches.PATCHES if hasattr(patch, "target")]
        in_place = [patch for patch in targets if patch.target.partition(":")[0] in sys.modules]
        missing = [patch.target for patch in in_place if not patch._applied]
        assert not missing, missing
        packages = {patch.package for patch in in_place}
        assert {"transformers", "accelerate", "deepspeed"} <= packages, packages
        for patch in in_place:
            owner, name = patch._owner()
            assert vars(owner)[name] is not patch._original, patch.target
    def code(function):
        return getattr(function, "__func__", function).__code__.co_filename
    def is_ours(function):
        return "cuboid_patches" in code(function)
"""
ORDERS = {
    "cuboid first": """
        import cuboid
        assert "transformers" not in sys.modules
        from transformers import AutoModelForCausalLM, PreTrainedModel
        assert is_ours(PreTrainedModel.from_pretrained)
        check()
    """,
    "a name of transformers first": """
        from transformers import PreTrainedModel, Trainer
        assert not is_ours(PreTrainedModel.from_pretrained)
        import cuboid
        assert is_ours(PreTrainedModel.from_pretrained)
        assert is_ours(vars(Trainer)["__init__"])
        check()
    """,
    "deepspeed, by name": """
        import cuboid
        from deepspeed import initialize
        assert is_ours(initialize)
        check()
    """,
    "deepspeed first": """
        import deepspeed
        import cuboid
        assert is_ours(deepspeed.initialize)
        check()
    """,
    "accelerate, by name": """
        import cuboid
        from accelerate.utils import broadcast_object_list, set_seed
        from accelerate import Accelerator
        assert is_ours(set_seed) and is_ours(broadcast_object_list) and is_ours(vars(Accelerator)["reduce"])
        import accelerate.utils.random
        # Once, not once for each module that has it.
        assert not is_ours(set_seed.__wrapped__) and not is_ours(accelerate.utils.random.set_seed.__wrapped__)
        check()
    """,
    "accelerate first": """
        from accelerate import Accelerator
        import cuboid
        assert is_ours(vars(Accelerator)["reduce"])
        check()
    """,
    "a module inside, which another one imports": """
        import cuboid
        from transformers.integrations.deepspeed import HfDeepSpeedConfig
        import accelerate.utils.deepspeed
        assert is_ours(vars(accelerate.utils.deepspeed.HfDeepSpeedConfig)["__init__"])
        check()
    """,
    "the Trainer": """
        import cuboid
        from transformers import Trainer
        assert is_ours(vars(Trainer)["__init__"]) and is_ours(vars(Trainer)["save_model"])
        check()
    """,
    "peft": """
        import cuboid
        import peft
        from peft import PeftModel
        assert is_ours(vars(PeftModel)["__init__"])
        check()
    """,
    "cuboid's own names": """
        import cuboid
        hook = sys.excepthook
        cuboid.load_config
        assert is_ours(sys.excepthook) and not is_ours(hook if hasattr(hook, "__code__") else check)
        check()
    """,
    "a module of cuboid's own that needs transformers": """
        import cuboid
        from cuboid.weights.load import load_sharded
        check()
    """,
    "threads": """
        import threading
        import cuboid
        errors = []
        def load(name):
            try:
                __import__(name)
                check()
            except BaseException as error:
                errors.append(repr(error))
        def load_all():
            names = ("transformers", "accelerate", "deepspeed")
            threads = [threading.Thread(target=load, args=(name,)) for name in names]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
        load_all()
        assert all("before the threads start" in error for error in errors), errors
        cuboid.from_config
        errors.clear()
        load_all()
        assert not errors
        check()
    """,
    "unregistered": """
        import cuboid
        cuboid.unregister()
        from transformers import PreTrainedModel
        from deepspeed import initialize
        assert not is_ours(PreTrainedModel.from_pretrained) and not is_ours(initialize)
        assert "cuboid_patches.transformers" not in sys.modules
        cuboid.register()
        assert is_ours(PreTrainedModel.from_pretrained)
        check()
    """,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("order", ORDERS)
def test_everything_is_patched_before_it_can_be_called(order):
    status, output = run(sys.executable, "-c", textwrap.dedent(CHECK) + textwrap.dedent(ORDERS[order]))
    assert status == 0, output


WORKERS = """
    import multiprocessing, sys
    import cuboid

    def patched(_):
        from transformers import PreTrainedModel
        return "cuboid_patches" in PreTrainedModel.from_pretrained.__func__.__code__.co_filename

    if __name__ == "__main__":
        assert "transformers" not in sys.modules
        with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
            assert pool.map(patched, [0]) == [True]
"""


# A fork server's workers import the script as spawned ones do.
@pytest.mark.ci
@pytest.mark.parametrize(
    "method", ["spawn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fork", "forkserver"))]
)
def test_workers_are_patched_however_they_start(tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(WORKERS))
    status, output = run(sys.executable, script, method)
    assert status == 0, output


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["--help"], ["train", "--help"], ["verify", "--help"], ["plan", "--help"], ["doctor", "--help"]],
)
def test_help_and_version_import_nothing_heavy(arguments):
    code = f"""
        import sys
        sys.argv = ["cuboid", *{arguments}]
        from cuboid.cli import app
        try:
            app()
        except SystemExit as end:
            assert end.code == 0
        heavy = sys.modules.keys() & {{"pydantic", "packaging", *{HEAVY}}}
        assert not heavy, heavy
        assert len(sys.modules) < 500, len(sys.modules)
    """
    status, output = run(sys.executable, "-c", textwrap.dedent(code))
    assert status == 0, output
    assert cuboid.__version__ in output if arguments == ["--version"] else "Usage: cuboid" in output


def test_the_import_brings_nothing_heavy():
    code = f"import sys, cuboid; print(sys.modules.keys() & {{*{HEAVY}, 'pydantic', 'rich'}}, len(sys.modules) < 300)"
    assert run(sys.executable, "-c", code) == (0, "set() True\n")


def test_the_shell_completes_commands_and_options():
    for words, completions in (("cuboid doc", "doctor"), ("cuboid estimate --seq", "--seq-len\n--sequence-length")):
        environment = {"_CUBOID_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        code = "import sys; sys.argv = ['cuboid']; from cuboid.cli import app; app()"
        status, output = run(sys.executable, "-c", code, **environment)
        assert (status, output.strip()) == (0, completions)


def test_names_are_the_same_to_type_checkers_and_at_run_time():
    source = ast.parse(Path(cuboid.__file__).read_text())
    (checked,) = (
        node for node in source.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    for_checkers = {alias.name: line.module for line in checked.body for alias in line.names}
    assert for_checkers == cuboid._MODULE_OF
    assert set(cuboid.__all__) <= set(dir(cuboid))
    for name in set(cuboid.__all__) - {"CuboidPlugin"}:
        value = getattr(cuboid, name)
        assert name not in for_checkers or value is getattr(importlib.import_module(for_checkers[name]), name)
    with pytest.raises(AttributeError, match="module 'cuboid' has no attribute 'shards'"):
        cuboid.shards  # noqa: B018
