"""``state.json``: exact round trips of any state, random states, and lineage."""

import enum
import json
import math
import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from cuboid import CheckpointError
from cuboid.checkpoint.format.manifest import Manifest, record_of
from cuboid.checkpoint.format.state_document import Ancestor, first_ancestors, lineage_behind, new_identity
from cuboid.checkpoint.format.state_file import STATE, TENSORS, write_state
from cuboid.checkpoint.format.state_file import read_state as read_checked
from cuboid.checkpoint.rng_state import capture, restore


def read_state(folder):
    """Read a document with a manifest that matches the files."""
    return read_checked(folder, Manifest(step=0, files=records(folder)))


def records(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): record_of(path) for path in files}


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex64, torch.complex128),
]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    size = math.prod(shape)
    if dtype == torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=dtype).reshape(shape)
    raw = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    return (
        torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)
        if raw
        else torch.empty(shape, dtype=dtype)
    )


#: Texts like our marks and paths, and lone surrogates, as in undecodable file names.
texts = st.one_of(
    st.text(st.characters(exclude_categories=())),
    st.sampled_from(["$tensor", "$tuple", "$dict", "$", "a.b", "__metadata__", ""]),
)
arrays = hnp.arrays(
    st.one_of(
        hnp.scalar_dtypes(),
        hnp.datetime64_dtypes(),
        hnp.byte_string_dtypes(max_len=4),
        hnp.unicode_string_dtypes(max_len=4),
    ),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    texts,
    tensors(),
    st.sampled_from(DTYPES),
    arrays,
    arrays.filter(lambda array: array.size)
    .map(lambda array: array.flat[0])
    .filter(lambda x: isinstance(x, np.generic)),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(texts, st.integers()), inner, max_size=3),
    ),
    max_leaves=8,
)


def same(one, other):
    """Whether two values are equal in type and bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(
            type(a) is type(b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        bits = [x.reshape(-1).view(torch.uint8) if x.numel() else None for x in (one, other)]
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and (bits[0] is None or torch.equal(*bits))
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return one.hex() == other.hex()  # distinguishes -0.0 from 0.0, and treats all NaNs as equal
    return one == other


@given(document=st.dictionaries(texts, values, max_size=4))
def test_every_document_round_trips(tmp_path_factory, document):
    folder = tmp_path_factory.mktemp("state")
    write_state(folder, document)
    assert same(read_state(folder), document)


def test_keys_with_the_same_dotted_path_keep_separate_tensors(tmp_path):
    document = {
        "a": {"b": torch.tensor(1), 0: torch.tensor(2), "0": torch.tensor(3)},
        "a.b": torch.tensor(4),
        "__metadata__": torch.tensor(5),
        "\ud800": torch.tensor(6),
        "\\ud800": torch.tensor(7),
    }
    write_state(tmp_path, document)
    assert same(read_state(tmp_path), document)


def test_views_parameters_and_lazy_conjugates_are_saved_by_value(tmp_path):
    x = torch.arange(12.0).reshape(3, 4)
    tangled = torch.tensor([1 + 2j, 3 - 4j])
    document = {
        "view": x.T[1:],
        "parameter": nn.Parameter(x),
        "conjugate": tangled.conj(),
        "negative": tangled.conj().imag,
        "strided": np.arange(12)[::3],
        "memmap": np.memmap(tmp_path / "file", dtype=np.int16, mode="w+", shape=(3,)),
    }
    write_state(tmp_path, document)
    state = read_state(tmp_path)
    assert torch.equal(state["view"], x.T[1:])
    assert torch.equal(state["parameter"], x)
    assert not state["parameter"].requires_grad
    assert state["conjugate"].tolist() == [1 - 2j, 3 + 4j]
    assert state["negative"].tolist() == [-2, 4]
    assert state["strided"].tolist() == [0, 3, 6, 9]
    assert same(state["memmap"], np.zeros(3, np.int16))


class Color(str, enum.Enum):  # noqa: UP042 (its __str__ differs from that of enum.StrEnum)
    RED = "red"


def test_subclasses_are_read_back_as_their_base_types(tmp_path):
    number = enum.IntEnum("Number", "ONE TWO")
    document = {"path": Path("a/b"), "size": torch.Size([2]), "ordered": OrderedDict(x=1), "n": number.TWO}
    write_state(tmp_path, {**document, "color": Color.RED})
    expected = {"path": "a/b", "size": (2,), "ordered": {"x": 1}, "n": 2, "color": "red"}
    assert same(read_state(tmp_path), expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1, 2}, r"client\.0 is a builtins\.set, which a checkpoint can't hold"),
        (b"raw", r"client\.0 is a builtins\.bytes"),
        (1j, r"client\.0 is a builtins\.complex"),
        (print, r"client\.0 is a builtins\.builtin_function"),
        ({"x": {(1, 2): 3}}, r"client\.0\.x has \(1, 2\) for a key"),
        ({True: 1}, r"client\.0 has True for a key"),
        (np.array([None]), r"client\.0 is a numpy\.ndarray of object"),
        (np.ma.masked_array([1], [True]), r"client\.0 is a numpy\.ma.*MaskedArray of int64"),
        (np.zeros(1, [("x", "i4")]), r"client\.0 is a numpy\.ndarray of \[\('x'"),
        (torch.zeros(2).to_sparse(), r"client\.0 is a torch\.Tensor of layout torch\.sparse_coo"),
        (torch.zeros(2, device="meta"), r"client\.0 is a torch\.Tensor .* on meta"),
        (10**5000, "can't be written as JSON: Exceeds the limit"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_unsupported_values_are_named_before_anything_is_written(tmp_path, value, message):
    with pytest.raises(CheckpointError, match=message):
        write_state(tmp_path, {"fine": torch.zeros(1), "client": [value]})
    assert not list(tmp_path.iterdir())


def test_a_document_that_contains_itself_is_rejected(tmp_path):
    document = {}
    document["again"] = [document]
    with pytest.raises(CheckpointError, match="nested too deeply"):
        write_state(tmp_path, document)


def test_a_damaged_state_is_rejected_with_its_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"state\.json: can't be read"):
        read_state(tmp_path)
    write_state(tmp_path, {"x": torch.zeros(3)})
    (tmp_path / TENSORS).unlink()
    with pytest.raises(CheckpointError, match=r"safetensors, which should hold x, is missing"):
        read_state(tmp_path)
    for content, message in [
        ("{", "isn't JSON"),
        ("[]", "holds a list instead of keys and values"),
        ('{"a": {"$new": 1}}', r"\$new is no mark that this version knows"),
        ('{"a": {"$dtype": "load"}}', r"torch\.load is no dtype"),
        ('{"a": {"$array": 3}}', "can't be understood"),
    ]:
        (tmp_path / STATE).write_text(content)
        with pytest.raises(CheckpointError, match=message):
            read_state(tmp_path)


@pytest.mark.parametrize("forged", ["|O", "O", "|V8", "O,i8", "(4)i8", "<i8\0", "i8", "<U", 8, None])
def test_bytes_are_only_decoded_as_numbers_times_and_texts(tmp_path, forged):
    write_state(tmp_path, {"x": np.arange(4)})
    document = json.loads((tmp_path / STATE).read_text())
    document["x"]["$array"]["dtype"] = forged
    (tmp_path / STATE).write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"state\.json: can't be understood"):
        read_state(tmp_path)


def test_nothing_is_decoded_before_its_checksum_was_compared(tmp_path):
    write_state(tmp_path, {"x": np.arange(4)})
    manifest = Manifest(step=0, files=records(tmp_path))
    (tmp_path / STATE).write_text((tmp_path / STATE).read_text().replace("<i8", "|O "))
    with pytest.raises(CheckpointError, match=r"state\.json: its sha256 isn't the one in manifest\.json"):
        read_checked(tmp_path, manifest)
    with pytest.raises(CheckpointError, match="the checkpoint has none by its list of files"):
        read_checked(tmp_path, Manifest(step=0, files={}))


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


@pytest.fixture
def kept_generators():
    """Restore this process's generators after the test."""
    states = capture(torch.device("cpu"))
    yield
    restore(states, torch.device("cpu"))


def test_restored_generators_continue_exactly(tmp_path, kept_generators):
    device = torch.device("cpu")
    draw()  # Gaussian generators cache every second number
    write_state(tmp_path, {"random": capture(device)})
    after = draw(), draw()
    restore(read_state(tmp_path)["random"], device)
    assert (draw(), draw()) == after


def test_random_states_of_another_kind_of_device_are_restored_as_far_as_possible(kept_generators, caplog):
    states = capture(torch.device("cpu"))
    after = draw()
    restore(states, torch.device("cuda"))
    assert draw() == after
    assert "no random state of a cuda" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_restored_generators_of_an_accelerator_continue_exactly(tmp_path, kept_generators):
    device = torch.device("cuda", torch.cuda.current_device())
    write_state(tmp_path, {"random": capture(device)})
    after = torch.rand(3, device=device).tolist()
    restore(read_state(tmp_path)["random"], device)
    assert torch.rand(3, device=device).tolist() == after


def describe(step, lineage, **client):
    return {
        **new_identity(),
        "steps": {"optimizer": step},
        "config": {"a": 1},
        "client": client,
        "layout": {"world_size": 2},
        "versions": {"torch": "2"},
        "lineage": [ancestor.model_dump() for ancestor in lineage],
    }


def test_a_lineage_grows_by_one_checkpoint_at_a_time(tmp_path):
    assert first_ancestors("") == []
    root = first_ancestors("org/model")
    assert root == [Ancestor(path="org/model")]
    chain = root
    for step in (3, 7):
        folder = tmp_path / f"step{step}"
        folder.mkdir()
        document = describe(step, chain, data_fingerprint="f")
        write_state(folder, document)
        assert first_ancestors(str(folder)) == [Ancestor(path=str(folder))]  # not complete yet
        Manifest(step=step, files=records(folder)).write(folder)
        chain = first_ancestors(str(folder))
        assert chain == lineage_behind(folder, read_state(folder))
    assert [ancestor.step for ancestor in chain] == [None, 3, 7]
    assert [ancestor.path for ancestor in chain] == ["org/model", str(tmp_path / "step3"), str(tmp_path / "step7")]
    assert chain[1].id != chain[2].id
    assert {ancestor.data_fingerprint for ancestor in chain[1:]} == {"f"}
    assert chain[1].config_sha256 == chain[2].config_sha256


def test_a_checkpoint_without_valid_lineage_is_rejected(tmp_path):
    document = describe(1, [])
    for change in ({"lineage": [{"path": 1}]}, {"steps": 3}, {"id": None, "client": None}):
        with pytest.raises(CheckpointError, match=r"state\.json: doesn't say where the checkpoint comes from"):
            lineage_behind(tmp_path, json.loads(json.dumps({**document, **change})))
