"""What a step of a pipeline is made of: micro-batches in every form, cuts, clocks, and messages."""

import gc
import math
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, BartConfig, BartForCausalLM

from conftest import TIMEOUT_S
from cuboid import Pipeline, from_pretrained, shard
from cuboid.config.schema import split_config
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from cuboid.errors import ConfigError, CuboidError, PeerLostError
from cuboid.models.batch.batch_check import Limits
from cuboid.models.batch.broadcast import ReplicasInStep, StepCall, read_micro_batch, share_micro_batches
from cuboid.models.kinds.causal import Causal
from cuboid.models.kinds.label_heads import QuestionAnswering, SequenceClassifier
from cuboid.models.pipeline.sequence_cut import MEASURED_STEPS, Cutter
from cuboid.models.pipeline.step_trace import StepTrace
from cuboid.models.stages.stage_cut import draw_outline
from cuboid.seq1f1b.runtime.p2p import Arrival, Channel
from cuboid.seq1f1b.runtime.profiler import UnitProfiler, gather_times
from cuboid.seq1f1b.schedule.schedules import SCHEDULES, PipelineShape
from cuboid.seq1f1b.schedule.unit_costs import LayerSizes, ModelSizes
from cuboid.verify import SmallModel

IDS = torch.arange(12).view(2, 6)
LIMITS = Limits(Causal(), tokens=16, labels=16)
ONE = MeshShape()
SIZES = ModelSizes((LayerSizes.decoder(32, 32, 32, 64),) * 4, head=32 * 64)


def cutter(shape=ONE, stages=2, choice=None, **keys):
    config, _ = split_config({"pipeline": {"engine": "seq1f1b", "stages": stages, **keys}})
    return Cutter(config.pipeline, SIZES, Mesh(shape, pipe=stages, rank=0, world_size=shape.size * stages), choice)


@pytest.mark.parametrize("partition", ["flops", "even"])
def test_a_gpu_is_given_whole_tiles_of_long_sequences(partition):
    config, _ = split_config({"pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 4, "partition": partition}})
    shape = MeshShape(1, 2, 3)
    mesh = Mesh(shape, pipe=2, rank=0, world_size=2 * shape.size)
    tile = math.lcm(128, 2 * 3)
    tiled, plain = Cutter(config.pipeline, SIZES, mesh, tiles=True), Cutter(config.pipeline, SIZES, mesh)
    lengths = tiled.lengths(32 * tile, 1)
    assert sum(lengths) == 32 * tile
    assert all(length % tile == 0 for length in lengths)
    # Too short to be balanced in tiles, or no whole number of them.
    for length in (15 * tile, 32 * tile + 6):
        assert tiled.lengths(length, 1) == plain.lengths(length, 1)


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": IDS, "labels": IDS},
        {"input_ids": IDS.tolist(), "labels": IDS.numpy(), "attention_mask": None},
        (IDS, IDS),
        [{"input_ids": IDS}, IDS],
    ],
)
def test_a_micro_batch_has_many_forms(batch):
    read = read_micro_batch(batch, LIMITS)
    assert read.keys() == {"input_ids", "labels"}
    assert all(torch.equal(tensor, IDS) for tensor in read.values())


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (IDS, "must be a dict with input_ids and labels, or a pair"),
        ({"labels": IDS}, "needs input_ids"),
        ({"input_ids": IDS[0]}, r"input_ids must be \[batch, sequence\], not \[6\]"),
        ({"input_ids": IDS[:, :0]}, r"not \[2, 0\]"),
        ({"input_ids": IDS, "labels": IDS[:1]}, r"labels is \[1, 6\], but input_ids is \[2, 6\]"),
        ({"input_ids": IDS, "position_ids": IDS[:, :5]}, "position_ids is"),
        ({"input_ids": IDS, "labels": IDS.float()}, "labels holds torch.float32; give torch.int64"),
        ({"input_ids": IDS, "token_type_ids": IDS}, "token_type_ids has no rule"),
        ({"input_ids": IDS, "adapter_names": ["one", "two"]}, "adapter_names has no rule in .* mesh without stages"),
        ({"input_ids": IDS, "labels": [[0, 1], [2]]}, "labels can't be made a tensor: .*rows are equally long"),
    ],
)
def test_a_malformed_micro_batch_is_named(batch, message):
    with pytest.raises(CuboidError, match=message):
        read_micro_batch(batch, LIMITS)


PACKED = {
    "input_ids": IDS[:1],
    "labels": IDS[:1],
    "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0]]),
    "cu_seq_lens_q": torch.tensor([0, 3, 5, 6], dtype=torch.int32),
    "cu_seq_lens_k": torch.tensor([0, 3, 5, 6], dtype=torch.int32),
    "max_length_q": 3,
    "max_length_k": torch.tensor(3),
    "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 2]], dtype=torch.int32),
}


def test_what_collators_say_of_packed_rows_is_compared_with_the_positions():
    """The collators of transformers and TRL for padding-free rows."""
    assert read_micro_batch(PACKED, LIMITS).keys() == {"input_ids", "labels", "position_ids"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cu_seq_lens_q", torch.tensor([0, 3, 6])),
        ("cu_seq_lens_k", [0, 2, 5, 6]),
        ("max_length_q", 6),
        ("seq_idx", torch.zeros(1, 6, dtype=torch.int64)),
        ("position_ids", torch.arange(6)[None] + 1),
    ],
)
def test_packed_rows_that_contradict_themselves_are_refused(name, value):
    with pytest.raises(CuboidError, match=r"contradicts position_ids, by which the sequences of the row begin at \["):
        read_micro_batch({**PACKED, name: value}, LIMITS)
    with pytest.raises(CuboidError, match="cu_seq_lens_q says where the sequences of a row begin, for which"):
        read_micro_batch({**PACKED, "position_ids": None}, LIMITS)


CLASSES = Limits(SequenceClassifier(3, 3), tokens=16, labels=3, types=2)
ANSWERS = Limits(QuestionAnswering(), tokens=16, labels=None)


@pytest.mark.parametrize(
    ("limits", "batch", "message"),
    [
        (
            CLASSES,
            {"input_ids": IDS, "labels": IDS},
            r"labels is \[2, 6\].*sequence classification needs \[2\] or \[2, 1\]",
        ),
        (CLASSES, {"input_ids": IDS, "token_type_ids": IDS[:1]}, r"token_type_ids is \[1, 6\]"),
        (CLASSES, {"input_ids": IDS, "start_positions": IDS[:, 0]}, "start_positions has no rule .* sequence class"),
        (ANSWERS, {"input_ids": IDS, "labels": IDS[:, 0]}, "labels were given to a model for question answering"),
        (ANSWERS, {"input_ids": IDS, "start_positions": IDS}, r"start_positions is \[2, 6\]"),
    ],
)
def test_a_micro_batch_of_another_task_has_that_tasks_targets(limits, batch, message):
    with pytest.raises(CuboidError, match=message):
        read_micro_batch(batch, limits)


def test_answers_need_a_start_and_an_end():
    batch = read_micro_batch({"input_ids": IDS, "start_positions": IDS[:, 0]}, ANSWERS)
    with pytest.raises(CuboidError, match="a micro-batch for question answering needs end_positions"):
        QuestionAnswering().for_stages(batch, shifts=False)


def test_lengths_are_filled_up_to_what_mesh_and_segments_need():
    mesh = MeshShape(1, 2, 3)
    for length, total in [(37, 42), (1, 18), (18, 18), (19, 24)]:
        lengths = cutter(mesh, segments=3, partition="even").lengths(length, 4)
        assert sum(lengths) == total
        assert all(part > 0 and part % 6 == 0 for part in lengths)


def test_by_operations_later_segments_are_shorter_and_even_ones_are_not():
    flops = cutter(segments=4).lengths(4096, 4)
    assert list(flops) == sorted(flops, reverse=True)
    assert flops[0] > flops[-1]
    assert cutter(segments=4, partition="even").lengths(4096, 4) == (1024,) * 4


def test_auto_settles_on_one_number_of_segments():
    asked = []

    def choice(length, micro_batches):
        asked.append((length, micro_batches))
        return 3

    auto = cutter(MeshShape(1, 2, 1), stages=4, choice=choice)
    assert [len(auto.lengths(length, 4)) for length in (8191, 512)] == [3, 3]
    # Once, for what the first sequences are filled up to.
    assert asked == [(8192, 4)]


def test_explicit_lengths_are_for_sequences_of_their_sum():
    explicit = cutter(segments=2, partition=[10, 6])
    assert explicit.lengths(16, 1) == (10, 6)
    with pytest.raises(ConfigError, match="adds up to 16, but sequences have 20 tokens; give sequences of 16"):
        explicit.lengths(20, 1)
    with pytest.raises(ConfigError, match=r"a segment of 9 tokens; use multiples of 2.* hidden axes"):
        cutter(MeshShape(1, 2, 1), segments=2, partition=[10, 9])


class Measured:
    """A trace in which the first segment takes as long as all others together."""

    def segment_times_s(self, micro_batch, lengths):
        return [3.0, 1.0, 1.0, 1.0]


def test_measured_times_move_the_cut_from_the_step_after():
    measured = cutter(segments=4, partition="measured")
    assert [step for step in range(1, 7) if measured.measures(step)] == list(MEASURED_STEPS)
    before = measured.lengths(4096, 1)
    measured.note(Measured(), [before])
    after = measured.lengths(4096, 1)
    assert sum(after) == 4096
    assert after[0] < before[0], "what took long becomes shorter"


def _clocks(skew_s):
    rank = dist.get_rank()
    real, time.perf_counter = time.perf_counter, lambda original=time.perf_counter: original() + skew_s * rank
    try:
        dist.barrier()
        now_s = time.perf_counter()
        gathered = gather_times([(now_s, now_s + 1)], dist.group.WORLD, torch.device("cpu"))
    finally:
        time.perf_counter = real
    return now_s - skew_s * rank, gathered


def test_all_times_are_brought_onto_one_clock(pool):
    everywhere = pool.run(3, _clocks, 1000.0, timeout_s=TIMEOUT_S)
    _, gathered = everywhere[0]
    assert all(theirs == gathered for _, theirs in everywhere)
    assert 0 < gathered.clock_error_s < 1, "the clocks are a thousand seconds apart"
    # In truth the processes have one clock.
    errors_s = [start_s - real_s for (real_s, _), ((start_s, _),) in zip(everywhere, gathered.ranks, strict=True)]
    assert max(errors_s) - min(errors_s) <= gathered.clock_error_s + 1e-6


def _traced():
    """Seconds of each action of a step; replica n has n + 1 micro-batches, and each rank's actions take other times."""
    mesh = Mesh(MeshShape(2, 1, 1))
    mesh.connect()
    replica, device = mesh.coordinate.data, torch.device("cpu")
    shape = PipelineShape(1, 1 + replica, 2)
    schedule, profiler = SCHEDULES["seq1f1b"](shape), UnitProfiler(device)
    for action in schedule[0]:
        with profiler.observe(action):
            time.sleep(0.01 * mesh.rank)
    trace = StepTrace.gather(profiler, shape, schedule, mesh, device)
    assert [span.action for span in trace.timeline.spans[0]] == list(schedule[0])
    return replica, mesh.copy_ranks[0], [span.end_s - span.start_s for span in trace.timeline.spans[0]]


def test_the_times_of_a_step_are_those_of_the_own_replica(pool):
    results = pool.run(4, _traced, timeout_s=TIMEOUT_S)
    for replica, first, seconds in results:
        assert len(seconds) == 4 * (1 + replica)
        # The ranks of a mesh use the times of its first one, each of which slept longer than those before it.
        assert all(s >= 0.01 * first for s in seconds)
        assert seconds == next(theirs for other, _, theirs in results if other == replica)
    assert {first for _, first, _ in results} == {0, 2}


def _share(kind):
    mesh = Mesh(MeshShape(1, 2, 1), pipe=2)
    mesh.connect()
    batches = [
        {"input_ids": IDS, "labels": IDS},
        {"input_ids": IDS[:1, :3], "shift_labels": IDS[:1, :3], "position_ids": IDS[:1, :3] + 4},
    ]
    source = {
        "fine": batches,
        "short": batches[:1],
        "wrong": [batches[0], {"input_ids": IDS.double()}],
        # Without values, so that copying it fails.
        "not copied": [batches[0], {"input_ids": IDS.to("meta")}],
        "interrupted": _interrupted(batches),
        "none": batches,
    }[kind]
    return _shared(source, LIMITS, mesh, {"interrupted": None, "none": 0}.get(kind, 2))


def _interrupted(batches):
    yield from batches
    raise KeyboardInterrupt


def _shared(source, limits, mesh, count=2):
    try:
        shared, _ = share_micro_batches(
            iter(source) if mesh.rank == 0 else None, count, limits, mesh, torch.device("cpu"), StepCall(trains=True)
        )
    except (StopIteration, KeyboardInterrupt, CuboidError) as error:
        return type(error).__name__, str(error), getattr(error, "rank", None)
    return [{name: tensor.tolist() for name, tensor in batch.items()} for batch in shared]


def test_one_rank_reads_and_all_know(pool):
    expected = [
        {"input_ids": IDS.tolist(), "labels": IDS.tolist()},
        {"input_ids": [[0, 1, 2]], "shift_labels": [[0, 1, 2]], "position_ids": [[4, 5, 6]]},
    ]
    assert pool.run(4, _share, "fine", timeout_s=TIMEOUT_S) == [expected] * 4
    assert pool.run(4, _share, "short", timeout_s=TIMEOUT_S) == [("StopIteration", "", None)] * 4
    failed = ("CuboidError", "input_ids holds torch.float64; give torch.int64", 0)
    assert pool.run(4, _share, "wrong", timeout_s=TIMEOUT_S) == [failed] * 4


def test_whatever_fails_on_the_reading_rank_is_known_to_all(pool):
    for kind, words, rank in pool.run(4, _share, "not copied", timeout_s=TIMEOUT_S):
        assert (kind, rank) == ("RankError", 0)
        assert words.startswith("reading the micro-batches: NotImplementedError: Cannot copy out of meta tensor")
    reader, *others = pool.run(4, _share, "interrupted", timeout_s=TIMEOUT_S)
    assert reader == ("KeyboardInterrupt", "", None)
    assert others == [("RankError", "reading the micro-batches: was stopped by KeyboardInterrupt", 0)] * 3
    none = ("CuboidError", "a step of a pipeline needs at least 1 micro-batch of each replica, not 0", None)
    assert pool.run(4, _share, "none", timeout_s=TIMEOUT_S) == [none] * 4


def _one_ended_and_one_failed(failing):
    mesh = Mesh(MeshShape())
    mesh.connect()
    try:
        with ReplicasInStep(mesh, torch.device("cpu")):
            raise CuboidError("labels is wrong").arising_on(mesh.rank) if mesh.rank == failing else StopIteration
    except CuboidError as error:
        return str(error), error.rank


@pytest.mark.parametrize("failing", [0, 1])
def test_a_replica_that_failed_is_named_and_not_the_one_whose_data_ended(pool, failing):
    assert pool.run(2, _one_ended_and_one_failed, failing, timeout_s=TIMEOUT_S) == [("labels is wrong", failing)] * 2


def _share_targets():
    mesh = Mesh(MeshShape(), pipe=2)
    mesh.connect()
    several = torch.tensor([[0.0, 1.0, 0.25], [1.0, 1.0, 1e-3]])
    batches = [
        {"input_ids": IDS, "token_type_ids": IDS % 2, "labels": several},
        {"input_ids": IDS[:1], "labels": several[:1].double() / 3},
    ]
    classes = Limits(SequenceClassifier(3, 3), tokens=16, labels=None, types=2)
    shared, _ = share_micro_batches(
        iter(batches) if mesh.rank == 0 else None, 2, classes, mesh, torch.device("cpu"), StepCall(trains=True)
    )
    alike = [
        ours.keys() == theirs.keys()
        and all(torch.equal(x, theirs[name]) and x.dtype == theirs[name].dtype for name, x in ours.items())
        for ours, theirs in zip(shared, batches, strict=True)
    ]
    rows = [{"input_ids": IDS, "start_positions": IDS[:, 0], "end_positions": IDS[:, 1]}] * 2
    return alike, _shared(rows, ANSWERS, mesh)


def test_what_rows_are_compared_with_travels_bit_by_bit(pool):
    answers = {"input_ids": IDS.tolist(), "start_positions": [0, 6], "end_positions": [1, 7]}
    assert pool.run(2, _share_targets, timeout_s=TIMEOUT_S) == [([True, True], [answers, answers])] * 2


def _messages():
    rank, sent = dist.get_rank(), []
    channel = Channel(dist.new_group([0, 1]), 1 - rank, sent.append)
    channel.meet(torch.device("cpu"), sends=rank == 0)
    tensors = [torch.full((2, 3 + number), float(number)) for number in range(4)]
    if rank == 0:
        for tensor in tensors:
            channel.send(tensor.T)  # what isn't contiguous arrives all the same
        channel.drain()
        return sent
    arrivals = [channel.post_receive((3 + number, 2), torch.float32, torch.device("cpu")) for number in range(4)]
    return [torch.equal(arrival.wait(), tensor.T) for arrival, tensor in zip(arrivals, tensors, strict=True)]


def test_what_is_sent_first_is_received_first(pool):
    assert pool.run(2, _messages, timeout_s=TIMEOUT_S) == [[24, 32, 40, 48], [True] * 4]


class Broken:
    def wait(self):
        raise RuntimeError("Connection closed by peer")


def test_a_peer_that_is_gone_is_named_with_its_rank():
    with pytest.raises(PeerLostError, match="rank 7 of the pipeline went away") as caught:
        Arrival(torch.empty(1), Broken(), 7).wait()
    assert caught.value.rank == 7


@pytest.mark.parametrize(("architecture", "longest"), [("gpt2", 256), ("llama", None), ("gpt_neox", None)])
def test_learned_positions_end_somewhere_and_rotary_ones_do_not(architecture, longest):
    config = SmallModel(architecture).config()
    cls = AutoModelForCausalLM._model_mapping[type(config)]
    assert draw_outline(cls, config).longest == longest


def _train_beyond(path, length):
    config = {"pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 2}}
    pipeline = Pipeline(from_pretrained(path, config))
    ids = torch.zeros((1, length), dtype=torch.int64)
    try:
        return pipeline.evaluate(iter([{"input_ids": ids, "labels": ids}]), 1).item()
    except CuboidError as error:
        return str(error)


def test_sequences_beyond_the_learned_positions_are_refused_on_all_ranks(pool, checkpoint):
    path = checkpoint(SmallModel("gpt2", positions=16))
    message = "a micro-batch has sequences of 17 tokens, but the model has learned 16 positions"
    assert all(answer.startswith(message) for answer in pool.run(2, _train_beyond, path, 17, timeout_s=TIMEOUT_S))
    assert all(answer > 0 for answer in pool.run(2, _train_beyond, path, 16, timeout_s=TIMEOUT_S))


def _evaluated(path, labels):
    pipeline = Pipeline(from_pretrained(path, {"pipeline": {"engine": "seq1f1b", "stages": 1, "segments": 1}}))
    try:
        return pipeline.evaluate(iter([{"input_ids": labels % 67, "labels": labels}]), 1).item()
    except CuboidError as error:
        return str(error)


def test_the_first_label_counts_where_labels_are_not_shifted(pool, tmp_path):
    config = BartConfig(
        vocab_size=67, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, dropout=0.0,
        max_position_embeddings=40,
    )  # fmt: skip
    BartForCausalLM(config).save_pretrained(tmp_path)
    labels = torch.arange(24).view(2, 12)
    labels[0, 0] = 67 + 5
    (answer,) = pool.run(1, _evaluated, str(tmp_path), labels, timeout_s=TIMEOUT_S)
    assert answer.startswith("labels[0, 0] of micro-batch 0 is 72, but the model's vocabulary has 67 entries")


def _unlabelled(path, config):
    """The loss of a step without any label, and the largest gradient."""
    batch = {"input_ids": IDS, "labels": torch.full_like(IDS, -100)}
    model = AutoModelForCausalLM.from_pretrained(path) if config is None else from_pretrained(path, config)
    if config is not None and "pipeline" in config:
        pipeline = Pipeline(model)
        loss, evaluated = pipeline.train(iter([batch, batch]), 2), pipeline.evaluate(iter([batch]), 1)
        assert evaluated.isnan()
        assert all(part.isnan() for part in pipeline.loss_parts)
    else:
        loss = model(**batch).loss
        loss.backward()
    gradients = [p.grad.abs().max() for p in model.parameters() if p.grad is not None]
    assert gradients
    return loss.item(), torch.stack(gradients).max().item()


def test_a_step_without_any_label_is_nan_and_changes_nothing_as_in_plain_transformers(pool, checkpoint):
    path = checkpoint(SmallModel("llama"))
    pipeline = {"engine": "seq1f1b", "stages": 2, "segments": 2}
    sections = [None, {"pipeline": pipeline}, {"pipeline": {**pipeline, "schedule": "zero_bubble", "head": "spread"}}]
    for axis in ("batch", "sequence", "hidden"):
        sections.append({"tensor_parallel": {"mode": "3d_tensor", "mesh": {axis: 2}}})
    for config in sections:
        for loss, gradient in pool.run(2, _unlabelled, path, config, timeout_s=TIMEOUT_S):
            assert math.isnan(loss), config
            assert gradient == 0, config


def _warnings_beyond(path, length):
    ids = torch.zeros((1, length), dtype=torch.int64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [_train_beyond(path, length)]
        mesh = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"sequence": 2}}}
        losses.append(from_pretrained(path, mesh)(input_ids=ids, labels=ids).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    return [str(warning.message) for warning in caught if "positions" in str(warning.message)]


def test_sequences_beyond_the_positions_that_rotary_embeddings_were_made_for_are_told_once(pool, checkpoint):
    path = checkpoint(SmallModel("llama", positions=16))
    first, second = pool.run(2, _warnings_beyond, path, 17, timeout_s=TIMEOUT_S)
    assert len(first) == 2
    assert all(
        message.startswith("a micro-batch has sequences of 17 tokens, beyond the model's 16") for message in first
    )
    assert not second
    assert pool.run(2, _warnings_beyond, path, 16, timeout_s=TIMEOUT_S) == [[], []]


#: By the rows of a mask and of positions: packed rows under a mask that shows both sides of a boundary, then what must
#: not be taken for them: a row per document, padding on the left with each library's positions, on the right, and
#: positions that jump ahead.
_PACKED = {
    "packed": ([1] * 8, [0, 1, 2, 3, 0, 1, 2, 3]),
    "packed, then padding": ([1] * 6 + [0] * 2, [0, 1, 2, 0, 1, 2, 3, 4]),
    "one document": ([1] * 8, [*range(8)]),
    "padding on the left": ([0] * 3 + [1] * 5, [1, 1, 1, 0, 1, 2, 3, 4]),
    "padding on the left from zero": ([0] * 3 + [1] * 5, [0, 0, 0, 0, 1, 2, 3, 4]),
    "padding on the right": ([1] * 5 + [0] * 3, [0, 1, 2, 3, 4, 1, 1, 1]),
    "positions that jump": ([1] * 8, [0, 1, 2, 3, 9, 10, 11, 12]),
}


def _warned_of_boundaries(path, stages):
    """By case, the warnings of two steps of a model of its own, on a mesh or in two stages."""
    if stages == 1:
        config = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"sequence": 2}}}
    else:
        config = {"pipeline": {"engine": "seq1f1b", "stages": stages, "segments": 2}}
    counts = {}
    for name, (mask, positions) in _PACKED.items():
        model, ids = from_pretrained(path, config), torch.arange(16).view(2, 8)
        batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.tensor([[1] * 8, mask])}
        batch["position_ids"] = torch.stack([torch.arange(8), torch.tensor(positions)])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                if stages == 1:
                    model(**batch).loss.backward()
                else:
                    Pipeline(model).train(iter([batch]), 1)
        texts = [str(warning.message) for warning in caught]
        counts[name] = [text for text in texts if "position_ids" in text and "attention_mask" in text]
    return counts


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("stages", [1, 2])
def test_packed_rows_whose_boundaries_a_mask_hides_are_told_once(pool, checkpoint, stages):
    first, second = pool.run(2, _warned_of_boundaries, checkpoint(SmallModel("llama")), stages, timeout_s=TIMEOUT_S)
    assert {name: len(texts) for name, texts in first.items()} == {name: "packed" in name for name in _PACKED}
    assert not any(second.values())


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("segments", [1, 3])
def test_an_evaluation_in_inference_mode_leaves_nothing_that_training_cannot_use(architecture, segments):
    def losses(context):
        torch.manual_seed(0)
        options = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
        config = AutoConfig.for_model(
            architecture, vocab_size=67, hidden_size=32, intermediate_size=48, num_attention_heads=4, **options
        )
        model = AutoModelForCausalLM.from_config(config)
        pipeline = Pipeline(shard(model, {"pipeline": {"engine": "seq1f1b", "stages": 1, "segments": segments}}))
        batch = {"input_ids": torch.arange(24).view(2, 12), "labels": torch.arange(24).view(2, 12)}
        values = []
        for _ in range(2):
            with context():
                values.append(pipeline.evaluate(iter([batch, batch]), 2).item())
            values.append(pipeline.train(iter([batch, batch]), 2).item())
        inference_tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.is_inference()]
        return values, [parameter.grad for parameter in model.parameters()], inference_tensors

    wanted, values = losses(torch.no_grad), losses(torch.inference_mode)
    assert values[0] == wanted[0]
    assert all(map(torch.equal, values[1], wanted[1]))
    assert values[2] == []
