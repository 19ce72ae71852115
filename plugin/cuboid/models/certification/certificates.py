"""The certificate of an architecture and its config in a pipeline.

It comes from the table that ships with Cuboid, from this machine's cache, or from a probe, which takes seconds.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, get_args

from filelock import FileLock
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures import liger
from cuboid.models.architectures.certificate import MODES, BatchKind, Certificate, Mode, Verdict, words_of_changes
from cuboid.models.architectures.plans import PLANS
from cuboid.models.architectures.roles import planned_parts
from cuboid.models.certification.check import check
from cuboid.models.certification.code_identity import CodeIdentity, Seen, code_of
from cuboid.models.certification.sides import small_for_probe
from cuboid.models.certification.small_config import fields_read, meaningful_fields
from cuboid.models.kinds.probe_rows import CannotProbe
from cuboid.models.kinds.registry import kind_of

T = TypeVar("T")
TABLE = Path(__file__).with_name("certified.json")
#: Digests of transformers' files whose code the tables' entries were found with, and of Cuboid's plans.
SOURCES_TABLE = Path(__file__).with_name("certified_sources.json")
FOLDER = "certificates"
#: Sources that results depend on. They are part of the cache's keys, but not of the table's, which the tests check.
_SOURCES = (Path(__file__).parents[1], *(Path(__file__).parents[2] / name for name in ("seq1f1b", "tensor3d")))
_LARGEST_CACHE_FILE_BYTES = 100_000
#: For another process that runs the same probe.
_LONGEST_WAIT_S = 60.0
#: All kinds of micro-batches.
KINDS: tuple[BatchKind, ...] = get_args(BatchKind)


def certificate_of(cls: type[PreTrainedModel], config: PretrainedConfig) -> Certificate:
    """The certificate of a class with a config; the probe runs if it isn't known yet."""
    try:
        question = Question.of(cls, config)
    except CannotProbe as error:
        return Certificate(None, str(error))
    known = question.known(TABLE)
    if known is not None:
        return _read(known)
    with naming_changes(cls, config):
        return replace(_found(question), changes=question.code.changes)


@contextmanager
def naming_changes(cls: type[PreTrainedModel], config: PretrainedConfig) -> Iterator[None]:
    """Context whose errors about a class name what was replaced in its code."""
    try:
        yield
    except UnsupportedModelError as error:
        try:
            words = words_of_changes(Question.of(cls, config).code.changes)
        except CannotProbe:
            words = ""
        if words in str(error):
            raise
        raise UnsupportedModelError(f"{error}{words}") from error


@dataclass(frozen=True)
class Question:
    """A class and a config for the probe. Those with the same file have the same answer, and are equal.

    Args:
        file: of the cache, whose name is a digest of all that the answer depends on.
        key: of the features, as in the table.
        code: the identity of the code that is probed.
        cls: the architecture's class.
        config: of the model to be loaded.
    """

    file: Path
    key: str = field(compare=False)
    code: CodeIdentity = field(compare=False)
    cls: type[PreTrainedModel] = field(compare=False)
    config: PretrainedConfig = field(compare=False)

    @classmethod
    def of(cls, architecture: type[PreTrainedModel], config: PretrainedConfig, folder: str = FOLDER) -> Question:
        """The question about an architecture's class with a config, answered in a folder of the cache.

        Raises:
            CannotProbe: the config can't be made small.
        """
        options = json.dumps([config._attn_implementation, fields_read(config)], sort_keys=True, default=str)
        asked = _asked((architecture, type(config), options))
        if asked.code is None or not asked.code.is_current_stock:
            small = small_for_probe(architecture, config)
            asked.features, asked.code = _features(architecture, config, small), code_of(architecture, small)
            asked.questions.clear()
        base = os.environ.get("XDG_CACHE_HOME")
        place = (Path(base) if base else Path.home() / ".cache") / "cuboid" / folder
        if place not in asked.questions:
            # Of this version of Cuboid's results for such a model.
            digest = digest_of({**asked.features, "code": asked.code.digest, "sources": _sources_digest()})
            file = place / f"{digest}.json"
            asked.questions[place] = cls(
                file, digest_of(asked.features), asked.code, architecture, copy.deepcopy(config)
            )
        return asked.questions[place]

    def known(self, table: Path) -> Any:
        """What a table that ships with Cuboid has about it; None if it has nothing about this code."""
        certified = certified_files()
        # A type without a plan has no digest, in the table neither.
        files = {**self.code.files, **plan_digests(self.config)}
        is_certified = all(certified.get(name) == digest for name, digest in files.items())
        return entries_of(table).get(self.key) if self.code.is_stock and is_certified else None

    def answer(self, find: Callable[[], T], read: Callable[[Any], T], written: Callable[[T], dict[str, Any]]) -> T:
        """The result of ``find``, or what the cache has of it; see :func:`found_once`."""
        # What can't be identified has another address in each process.
        return find() if self.code.unknown else found_once(self.file, find, read, written)


@dataclass
class _Asked:
    """What was found last about a class and a config's options, since a load asks several times in each folder."""

    key: tuple[Any, type, str]
    features: Mapping[str, Any] = field(default_factory=dict)
    code: CodeIdentity | None = None
    questions: dict[Path, Question] = field(default_factory=dict)


_asked = functools.lru_cache(maxsize=64)(_Asked)


class CodeCheck:
    """Tells whether the code that is certified now has been replaced."""

    def __init__(self, cls: type[PreTrainedModel], config: PretrainedConfig) -> None:
        # Frameworks and scripts change options later, such as `use_cache`, which don't matter here.
        self._cls, self._config = cls, copy.deepcopy(config)
        #: Of the code when it was looked at last; None if nothing says what the code is.
        self.seen: Seen | None = None
        # Where no small model can be made, the user has verified the model.
        with suppress(CannotProbe):
            code = Question.of(cls, self._config).code
            self._changes, self.seen = {*code.changes}, code.seen

    def __deepcopy__(self, _: dict[int, Any]) -> CodeCheck:
        # A copy of the model runs the same code.
        return self

    def check(self) -> None:
        """Look at the code again.

        Raises:
            UnsupportedModelError: it is another. Names what was replaced.
        """
        code = Question.of(self._cls, self._config).code
        # Only what has a name: classes may also remember something of themselves at a first call.
        changes = tuple(sorted(change for change in {*code.changes} ^ self._changes if not _is_of_framework(change)))
        if changes:
            remedy = "; replace code before the model is sharded, so that it is certified too"
            raise UnsupportedModelError(
                f"the code of {self._cls.__name__} isn't what was certified when it was sharded"
                f"{words_of_changes(changes)}{'' if liger.is_among(changes) else remedy}"
            )
        self.seen = code.seen


def _is_of_framework(change: str) -> bool:
    """Whether a framework has replaced code, as DeepSpeed's profiler does for a step, to count operations."""
    return change.partition(" is ")[2].startswith(("deepspeed.", "accelerate."))


# In this process, too, because files can't be written everywhere, and a load asks several times.
@cache
def _found(question: Question) -> Certificate:
    return question.answer(lambda: find_out(question.cls, question.config), _read, _written)


def find_out(cls: type[PreTrainedModel], config: PretrainedConfig) -> Certificate:
    """Run the probe, regardless of table and cache."""
    try:
        return Certificate(check(cls, config))
    except CannotProbe as error:
        return Certificate(None, str(error))


def features_of(cls: type[PreTrainedModel], config: PretrainedConfig) -> dict[str, Any]:
    """All that decides which code runs: the class, the version of transformers, and the config without its sizes.

    Raises:
        CannotProbe: the config can't be made small.
    """
    return _features(cls, config, small_for_probe(cls, config))


def _features(cls: type[PreTrainedModel], config: PretrainedConfig, small: PretrainedConfig) -> dict[str, Any]:
    # A model of a class that knows no other says "eager" once it is made, and its config doesn't before.
    is_chosen = config._attn_implementation == "eager" and cls._supports_sdpa
    # These decide which loss a classifier computes.
    kind = kind_of(cls, config)
    targets = {"targets": [min(kind.outputs, 2), kind.classes is None]} if kind.outputs else {}
    return {
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "transformers": ".".join(version("transformers").split(".")[:2]),
        "attention": "eager" if is_chosen else "fused",
        "config": meaningful_fields(small),
        **targets,
    }


def entry_of(features: Mapping[str, Any], certificate: Certificate) -> tuple[str, dict[str, Any]]:
    """The key and the value of a table entry."""
    return digest_of(features), _written(certificate)


def digest_of(features: Mapping[str, Any]) -> str:
    """The key for the result of :func:`features_of`."""
    text = json.dumps(features, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def entries_of(file: Path) -> Mapping[str, Any]:
    """The entries of a table that ships with Cuboid, by their keys."""
    table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {key: entry for group in table["architectures"].values() for key, entry in group.items()}


def plan_digests(config: PretrainedConfig) -> dict[str, str | None]:
    """Digests of Cuboid's plans for a config's model types, by names like those of files; None for types without."""
    plans = {part.model_type: PLANS.get(part.model_type) for part in planned_parts(config)}
    return {f"plans/{name}": digest_of(plan) if plan else None for name, plan in plans.items()}


@cache
def certified_files() -> Mapping[str, str]:
    """Digests of the files of transformers, and of Cuboid's plans, that the tables that ship with Cuboid hold for."""
    files: dict[str, str] = json.loads(SOURCES_TABLE.read_text(encoding="utf-8"))
    return files


@cache
def _sources_digest() -> str:
    total = hashlib.sha256()
    for folder in _SOURCES:
        for file in sorted(folder.rglob("*.py")):
            total.update(file.read_bytes())
    return total.hexdigest()


def _written(certificate: Certificate) -> dict[str, Any]:
    if certificate.verdict is None:
        return {"obstacle": certificate.obstacle}
    verdict = asdict(certificate.verdict)
    refused = {mode: kinds for mode, kinds in verdict["refused"].items() if kinds}
    entry = {"refused": refused, "gives_cache": verdict["gives_cache"], "error": verdict["error"]}
    return entry if verdict["shifts_labels"] else {**entry, "shifts_labels": False}


def _read(entry: Any) -> Certificate:
    """The inverse of :func:`_written`.

    Raises:
        ValueError, KeyError, TypeError: the entry isn't what that writes.
    """
    if "obstacle" in entry:
        return Certificate(None, str(entry["obstacle"]))
    refused: dict[Mode, dict[BatchKind, str]] = {mode: {} for mode in MODES}
    for mode, kinds in entry["refused"].items():
        for kind, reason in kinds.items():
            if mode not in MODES or kind not in KINDS:
                raise ValueError(f"unknown: {mode}, {kind}")
            refused[mode][kind] = str(reason)
    shifts_labels = entry.get("shifts_labels", True) is not False
    return Certificate(
        Verdict(refused, float(entry["error"]), gives_cache=entry["gives_cache"] is True, shifts_labels=shifts_labels)
    )


def found_once(
    file: Path, find: Callable[[], T], read: Callable[[Any], T], written: Callable[[T], dict[str, Any]]
) -> T:
    """A result from the cache; if it isn't there, one process computes it while the others wait for its file.

    Without the wait all ranks would probe at the same time, which on few cores takes as many times as long.

    Args:
        file: of the cache.
        find: computes the result, in seconds; it must not communicate.
        read: parses the file's content; if it raises ValueError, KeyError or TypeError, the file isn't trusted.
        written: the inverse of ``read``.
    """
    remembered = _from_cache(file, read)
    if remembered is not None:
        return remembered
    with ExitStack() as stack:
        # If files can't be locked, or the lock's holder hangs (the timeout is an OSError), each process probes itself.
        with suppress(OSError, NotImplementedError):
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(file.with_suffix(".lock"), timeout=_LONGEST_WAIT_S))
        remembered = _from_cache(file, read)
        if remembered is not None:
            return remembered
        result = find()
        _to_cache(file, written(result))
    return result


def _from_cache(file: Path, read: Callable[[Any], T]) -> T | None:
    """The result of ``read`` on a file of the cache; None if there is no file, or none that can be trusted."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        if file.is_file() and file.stat().st_size <= _LARGEST_CACHE_FILE_BYTES:
            return read(json.loads(file.read_text(encoding="utf-8")))
    return None


def remember(file: Path, certificate: Certificate) -> None:
    """Write a certificate to its file of the cache."""
    _to_cache(file, _written(certificate))


def _to_cache(file: Path, entry: dict[str, Any]) -> None:
    """Write a file of the cache atomically."""
    # A cache that can't be written only costs the seconds of further probes. Ranks may write the same file at once.
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
        part = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as opened:
                json.dump(entry, opened, ensure_ascii=False)
            part.replace(file)
        finally:
            # It is still there if the disk is full.
            part.unlink(missing_ok=True)
