"""Loggers of other packages get each figure once, from one process: TensorBoard, W&B and Comet offline, MLflow.

Their packages aren't among those that the tests install; see ``extra_packages``.
"""

import json
import math
import sys
import textwrap

import pytest

from extra_packages import search_path_with
from launching import BIN, run
from tiny_text import write_model_and_text

pytestmark = pytest.mark.slow

#: The loggers, and what they need beside Cuboid's requirements.
PACKAGES = (
    *("tensorboard==2.21.*", "wandb==0.31.*", "mlflow-skinny==3.17.*", "comet_ml==3.58.*"),
    *("absl-py", "attrs", "cachetools", "certifi", "charset-normalizer", "cloudpickle", "configobj", "cwevals"),
    *("databricks-sdk", "distro", "dulwich", "everett", "fastapi", "gitdb", "gitpython", "google-auth"),
    *("googleapis-common-protos", "grpcio", "httpcore", "httpx", "importlib-metadata==8.7.*", "jsonschema"),
    *("jsonschema-specifications", "markdown", "opentelemetry-api", "opentelemetry-exporter-otlp-proto-http"),
    *("opentelemetry-exporter-otlp-proto-common", "opentelemetry-exporter-otlp-common"),
    *("opentelemetry-exporter-http-transport", "opentelemetry-proto", "opentelemetry-sdk"),
    *("opentelemetry-semantic-conventions", "platformdirs", "protobuf", "pyasn1", "pyasn1-modules", "python-box"),
    *("python-dotenv", "referencing", "requests", "requests-toolbelt", "rpds-py", "semantic-version", "sentry-sdk"),
    *("simplejson", "smmap", "sniffio", "sqlparse", "starlette", "tensorboard-data-server", "urllib3", "uvicorn"),
    *("werkzeug", "wurlitzer", "xxhash", "zipp"),
)
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 2},
}
#: Prints what each logger has in a folder: for each of its runs, the values of each figure by step.
READER = """
    import collections, json, sys, zipfile
    from pathlib import Path

    root, runs = Path(sys.argv[1]), collections.defaultdict(list)

    def of_run(logger):
        runs[logger].append(collections.defaultdict(list))
        return runs[logger][-1]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    for file in sorted(root.rglob("events.out.tfevents*")):
        events, figures = EventAccumulator(str(file)), of_run("tensorboard")
        events.Reload()
        for name in events.Tags()["scalars"]:
            figures[name] += [[event.step, event.value] for event in events.Scalars(name)]

    from wandb.proto.wandb_internal_pb2 import Record
    def records(data, block=32768):
        # Of a log of LevelDB's form, after W&B's header of 7 bytes.
        at, whole = 7, b""
        while at + 7 <= len(data):
            if block - at % block < 7:
                at += block - at % block
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last part
                yield whole
                whole = b""

    for file in sorted(root.rglob("*.wandb")):
        figures = of_run("wandb")
        for data in records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            items = {".".join(x.nested_key) or x.key: json.loads(x.value_json) for x in record.history.item}
            for name, value in items.items():
                if not name.startswith("_") and name != "train/global_step":
                    figures[name].append([items.get("train/global_step", items.get("_step")), value])

    for file in sorted(root.rglob("comet/*.zip")):
        figures = of_run("comet")
        for line in zipfile.ZipFile(file).read("messages.json").decode().splitlines():
            metric = json.loads(line)["payload"].get("metric")
            if metric is not None and not metric["metricName"].startswith("sys."):
                figures[metric["metricName"]].append([metric["step"], float(metric["metricValue"])])

    for folder in sorted(root.rglob("mlruns/*/*/metrics")):
        figures = of_run("mlflow")
        for file in folder.rglob("*"):
            if file.is_file():
                lines = [line.split() for line in file.read_text().splitlines()]
                figures[str(file.relative_to(folder))] += [[int(step), float(value)] for _, value, step in lines]
    print("RUNS" + json.dumps(runs))
"""
TRAINER = """
    import sys
    import cuboid
    import torch
    from transformers import AutoModelForCausalLM, TrainingArguments

    path, out, config = sys.argv[1:4]
    ids = torch.randint(0, 300, (64, 16), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        out, deepspeed=config, use_cpu=True, disable_tqdm=True, max_steps=4, logging_steps=1, eval_strategy="steps",
        eval_steps=2, save_strategy="no", per_device_train_batch_size=2, per_device_eval_batch_size=2,
        gradient_accumulation_steps=2, learning_rate=1e-2, report_to=["tensorboard", "wandb", "mlflow", "comet_ml"],
    )
    model = AutoModelForCausalLM.from_pretrained(path)
    trainer = cuboid.CuboidTrainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=[cuboid.MetricsCallback()]
    )
    trainer.train()
"""


@pytest.fixture(scope="module")
def search_path():
    return search_path_with("comet_ml", PACKAGES)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    write_model_and_text(folder, layers=2)
    (folder / "read.py").write_text(textwrap.dedent(READER))
    (folder / "trainer.py").write_text(textwrap.dedent(TRAINER))
    return folder


def variables_of(folder, search_path):
    for name in ("wandb", "comet", "tensorboard"):
        (folder / name).mkdir(parents=True)
    return {
        "PYTHONPATH": search_path,
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder / "wandb"),
        "WANDB_SILENT": "true",
        "COMET_OFFLINE_DIRECTORY": str(folder / "comet"),
        "COMET_START_ONLINE": "0",
        # Comet would take over what is given to TensorBoard and MLflow, too.
        "COMET_DISABLE_AUTO_LOGGING": "1",
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
    }


def logged(job, folder, search_path):
    status, output = run(sys.executable, job / "read.py", folder, PYTHONPATH=search_path)
    assert status == 0, output
    return json.loads(output.rpartition("RUNS")[2])


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_logged(figures, name, expected):
    """A logger has these values of a figure by step, each once."""
    assert [step for step, _ in figures[name]] == [step for step, _ in expected], (name, figures[name])
    for (_, value), (_, other) in zip(figures[name], expected, strict=True):
        assert math.isclose(value, other, rel_tol=1e-6), name


def torchrun(*command, **variables):
    return run(BIN / "torchrun", "--standalone", "--nproc-per-node", 2, *command, timeout_s=400, **variables)


def test_cuboid_train(job, tmp_path, search_path):
    """DeepSpeed's sections, by the number of samples."""
    variables = variables_of(tmp_path, search_path)
    loggers = {
        "tensorboard": {"enabled": True, "output_path": str(tmp_path / "tensorboard"), "job_name": "run"},
        "wandb": {"enabled": True, "project": "cuboid"},
        "comet": {"enabled": True, "online": False, "samples_log_interval": 1, "project": "cuboid"},
    }
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **loggers}))
    files = ("--model", job / "model", "--data", job / "text", "--config", tmp_path / "config.json")
    options = ("--sequence-length", 16, "--steps", 3, "--heldout-blocks", 2)
    out = tmp_path / "out"
    status, output = torchrun("-m", "cuboid.cli", "train", *files, *options, "--out", out, **variables)
    assert status == 0, output
    runs = logged(job, tmp_path, search_path)
    assert {logger: len(figures) for logger, figures in runs.items()} == {"tensorboard": 1, "wandb": 1, "comet": 1}
    lines = lines_of(out)
    for (figures,) in runs.values():
        for name in ("loss", "learning_rate", "grad_norm", "tokens_per_s", "memory_bytes", "heldout_loss"):
            # Four rows a step.
            expected = [(4 * line["step"], line[name]) for line in lines if line.get(name) is not None]
            assert expected, name
            assert_logged(figures, f"Train/Samples/{name}", expected)


def test_cuboid_train_by_the_trainers_loggers(job, tmp_path, search_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    files = ("--model", job / "model", "--data", job / "text", "--config", tmp_path / "config.json")
    options = ("--sequence-length", 16, "--steps", 3, "--heldout-blocks", 2, "--eval", f"code={job / 'read.py'}")
    loggers = ("tensorboard", "wandb", "mlflow")
    reporting = [part for logger in loggers for part in ("--report-to", logger)]
    arguments = ("-m", "cuboid.cli", "train", *files, *options, *reporting, "--out", tmp_path / "out")
    status, output = torchrun(*arguments, **variables_of(tmp_path, search_path))
    assert status == 0, output
    runs = logged(job, tmp_path, search_path)
    assert {logger: len(figures) for logger, figures in runs.items()} == dict.fromkeys(loggers, 1)
    lines = lines_of(tmp_path / "out")
    for logger, (figures,) in runs.items():
        for name in ("loss", "learning_rate", "grad_norm", "tokens_per_s", "heldout_loss", "code_loss"):
            is_evaluated = name in ("heldout_loss", "code_loss")
            key = f"eval/{name}" if is_evaluated else f"train/{name}"
            if logger == "mlflow":
                key = f"eval_{name}" if is_evaluated else name
            expected = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            assert expected, name
            assert key in figures, (logger, key, sorted(figures))
            assert_logged(figures, key, expected)


def test_the_trainer(job, tmp_path, search_path):
    variables = variables_of(tmp_path, search_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    out = tmp_path / "out"
    status, output = torchrun(job / "trainer.py", job / "model", out, tmp_path / "config.json", **variables)
    assert status == 0, output
    runs = logged(job, tmp_path, search_path)
    names = ("tensorboard", "wandb", "comet", "mlflow")
    assert {logger: len(figures) for logger, figures in runs.items()} == dict.fromkeys(names, 1)
    lines = lines_of(out)
    for logger, (figures,) in runs.items():
        for name in ("loss", "learning_rate", "grad_norm", "step_s", "memory_bytes", "eval_loss"):
            expected = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            assert expected, name
            key = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
            if logger == "mlflow":
                key = name
            assert key in figures, (logger, key, sorted(figures))
            assert_logged(figures, key, expected)
