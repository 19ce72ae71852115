"""``Booster(plugin=CuboidPlugin(config))``: ColossalAI's calls, on Cuboid's mesh and pipeline.

Written for ColossalAI 0.5, with its plugin interface and without patches. The parts of ColossalAI that it uses run on
later versions of torch and transformers than ColossalAI's own plugins do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch
from colossalai.accelerator import get_accelerator
from colossalai.booster.plugin.pp_plugin_base import PipelinePluginBase
from colossalai.interface.optimizer import DistributedOptim
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from cuboid.config.config_file import ConfigSource
from cuboid.distributed.mesh import current_world_size
from cuboid.errors import ConfigError, CuboidError, OptimizerError, UnsupportedModelError
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.integrations.colossalai.checkpoint import CuboidCheckpointIO
from cuboid.integrations.colossalai.criterion import scale_of
from cuboid.integrations.colossalai.model import CuboidModel
from cuboid.integrations.colossalai.optimizer import CuboidOptimizer, is_boosted
from cuboid.integrations.colossalai.parallel_sizes import LayoutNames
from cuboid.integrations.colossalai.plugin_config import PluginConfig, check_alike
from cuboid.integrations.handoff import (
    adopt_model,
    adopt_optimizer,
    align_with_stages,
    check_schedule,
    check_trains,
    step_whole,
)
from cuboid.models.batch.batch_check import Limits
from cuboid.models.batch.broadcast import read_micro_batch, split_rows
from cuboid.models.sharded.sharded_model import mesh_of, unwrap
from cuboid.optim.data_parallel_optimizer import is_fresh
from cuboid.optim.elementwise import OwnedShards, check_optimizer
from cuboid.optim.whole_tensors import WholeRule
from cuboid.weights.checkpointing import Origin


class CuboidPlugin(LayoutNames, PipelinePluginBase):
    """3-D tensor parallelism and the Seq1F1B pipeline for causal language models of Hugging Face, under a ``Booster``.

    One booster serves one model. Losses of a pipeline are means over the label tokens of all micro-batches and all
    replicas, the same on every rank; without one, each replica's is the mean over its own.

    Args:
        config: a path to a .json or .yaml file, or a dict, with the sections that DeepSpeed's config has for Cuboid.
            Beside them ``train_micro_batch_size_per_gpu``, ``gradient_accumulation_steps``, ``gradient_clipping``,
            ``bf16.enabled`` and ``zero_optimization.stage`` (0 or 1) are read.

    Attributes:
        config: Cuboid's part. ``cuboid.from_pretrained(path, plugin.config)`` reads only this rank's slices.

    Raises:
        ConfigError, MeshError: the config is wrong, has an unknown key, or doesn't fit the world.
    """

    def __init__(self, config: ConfigSource) -> None:
        super().__init__()
        # Of a rank whose config is wrong, the others would wait in the first collective.
        self._config = run_on_all_ranks(
            lambda: PluginConfig.read(config, current_world_size()), what="the config of CuboidPlugin"
        )
        self.config = self._config.cuboid
        self._checkpoint_io = CuboidCheckpointIO()
        self._model: CuboidModel | None = None

    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: Any = None,
    ) -> tuple[CuboidModel, CuboidOptimizer | None, Any, Any, Any]:
        """Called by ``booster.boost``: shard the model unless it is sharded, and wrap it and the optimizer.

        Raises:
            CuboidError: the model or the optimizer can't be trained so.
        """
        boosted = run_on_all_ranks(lambda: self._boost(model, optimizer, lr_scheduler), what="booster.boost")
        return boosted, boosted.optimizer, criterion, dataloader, lr_scheduler

    def _boost(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, lr_scheduler: Any) -> CuboidModel:
        if self._model is not None:
            raise CuboidError("this plugin has boosted a model already; make another plugin and booster for the next")
        # Agreed on before the first collective, in which the others would wait for a rank whose model can't be sharded.
        adopted = run_on_all_ranks(lambda: adopt_model(model, self.config), what="booster.boost of the model")
        # The sharded model inside of PEFT's, if it has adapters: they are in its layers.
        sharded: Any = unwrap(adopted)
        self.mesh = mesh_of(sharded)
        self.mesh.connect()
        self.mesh.connect_host()
        classes = {"the optimizer": type(optimizer).__name__, "lr_scheduler": type(lr_scheduler).__name__}
        check_alike({**self._config.values(), **classes}, self.mesh)
        what = "booster.boost of the optimizer"
        rule = run_on_all_ranks(lambda: self._take_optimizer(sharded, optimizer, lr_scheduler), self.mesh, what=what)
        sharded.to(get_accelerator().get_current_device())
        booster = self._config.booster
        boosted = CuboidModel(sharded, Origin.of("colossalai", self.config, self._config.source, sharded))
        if booster.precision == "fp32":
            _cast((p for p in sharded.parameters() if p.dtype.itemsize < torch.float32.itemsize), torch.float32)
        if optimizer is not None:
            check_trains(sharded)
            groups = run_on_all_ranks(
                lambda: align_with_stages(sharded, optimizer.param_groups, optimizer, lr_scheduler),
                self.mesh,
                what=what,
            )
            boosted.checkpointing.groups = groups.names
            boosted.optimizer = CuboidOptimizer(
                optimizer,
                sharded,
                dtype=torch.bfloat16 if booster.precision == "bf16" else None,
                split=booster.zero_optimization.stage == 1,
                max_norm=booster.gradient_clipping,
                groups=groups,
                pipeline=boosted.pipeline,
                stepped=boosted.stepped,
            )
            adapter = boosted.adapter
            if rule is not None and adapter is not None:
                boosted.whole_states = step_whole(sharded, adapter, rule)
        sharded.cuboid.state.made.take(sharded, "booster.boost")
        if booster.precision == "bf16":
            # The parameters that aren't in the optimizer, which has cast its own.
            _cast(sharded.parameters(), torch.bfloat16)
        self._model = boosted
        self._checkpoint_io.attach(boosted)
        return boosted

    def _take_optimizer(self, model: nn.Module, optimizer: Any, schedule: Any) -> WholeRule | None:
        """Make the optimizer step on the sharded model, or raise an error that says why it can't.

        Returns which tensors it must be given whole.
        """
        assert self.mesh is not None
        check_schedule(schedule, optimizer)
        if optimizer is None:
            return None
        name = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptimizerError(f"boost takes an optimizer of torch's kind, not a {name}")
        if isinstance(optimizer, DistributedOptim):
            raise OptimizerError(
                f"{name} expects ColossalAI's own way to shard; take an optimizer that treats each element by itself, "
                "such as torch.optim.AdamW or ColossalAI's HybridAdam"
            )
        if is_boosted(optimizer):
            raise OptimizerError(f"this {name} was boosted before; make another one for each booster.boost")
        adopt_optimizer(model, optimizer)
        owned = OwnedShards.of(self.mesh, self._config.flat(replicas=self.dp_size))
        rule = check_optimizer(optimizer, owned)
        if owned.flat and not is_fresh(optimizer):
            raise OptimizerError(
                f"the {name} has a state already, of parameters as they were before booster.boost laid them end to "
                "end; boost it before its first step, and load its state with booster.load_optimizer"
            )
        return rule

    def execute_pipeline(
        self,
        data_iter: Iterator[Any] | None,
        model: CuboidModel,
        criterion: Callable[..., Any] | None = None,
        optimizer: CuboidOptimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Forward and backward of the next batch, cut into micro-batches; under ``torch.no_grad()``, forward only.

        Only the first rank of each replica reads ``data_iter``; the others may give None.

        Args:
            data_iter: yields batches as Hugging Face models take them.
            model: the boosted model.
            criterion: None, or a function that returns ``outputs.loss``, perhaps times a number.
            optimizer: the boosted optimizer; needed for backward.
            return_loss: whether to return the loss.
            return_outputs: not supported.

        Returns:
            ``{"loss": …, "outputs": None}``; the loss is a scalar tensor, the same on every rank.

        Raises:
            StopIteration: on every rank, if the iterator is at its end.
            CuboidError: on every rank, if a batch is malformed or an argument isn't supported.
        """
        if model is not self._model:
            raise CuboidError(
                f"execute_pipeline is given a {type(model).__name__} that isn't what this booster's boost returned"
            )
        pipeline = model.pipeline
        if pipeline is None:
            raise ConfigError(
                'execute_pipeline needs one: add "pipeline": {"engine": "seq1f1b", "stages": 2} to the config; or '
                "call the model, booster.backward and optimizer.step"
            )
        if return_outputs:
            raise CuboidError("return_outputs: a pipeline never has the logits of a batch in one place; leave it False")
        scale = scale_of(criterion)
        if torch.is_grad_enabled() and scale == 0.0:
            raise CuboidError("the criterion makes 0 of any loss, so that nothing would be trained; leave it None")
        batches = None if data_iter is None else self._micro_batches(data_iter, pipeline.limits)
        if not torch.is_grad_enabled():
            loss = pipeline.evaluate(batches, None, scale=scale)
        elif optimizer is None or optimizer is not model.optimizer:
            raise CuboidError(
                "execute_pipeline runs backward, so it needs the optimizer that boost gave; to evaluate call it inside "
                "torch.no_grad()"
            )
        else:
            optimizer.accumulate()
            loss = pipeline.train(batches, None, gradient_scale=scale, complete=False)
            optimizer.take_gradients()
            model.count_rows(pipeline.rows)
        return {"loss": loss * scale if return_loss else None, "outputs": None}

    def _micro_batches(self, data_iter: Iterator[Any], limits: Limits) -> Iterator[Any]:
        """The next batch, cut into micro-batches; it is read when the first of them is."""
        if not isinstance(data_iter, Iterator):
            raise CuboidError(
                f"execute_pipeline is given a {type(data_iter).__name__}, of which it would take the first batch each "
                "time; make an iterator once, data = iter(loader), or give iter([batch])"
            )
        for batch in itertools.islice(data_iter, 1):
            full_batch = read_micro_batch(batch, limits)
            rows = self._config.rows_of(full_batch["input_ids"].shape[0], training=torch.is_grad_enabled())
            yield from split_rows(full_batch, rows)

    @contextmanager
    def no_sync(self, model: nn.Module | None = None, optimizer: Any = None) -> Iterator[None]:  # noqa: ARG002
        """No-op: gradients are reduced over the replicas only once, when the step needs them."""
        yield

    def prepare_dataloader(
        self,
        dataset: Dataset,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type[DistributedSampler] | None = None,
        **kwargs: Any,
    ) -> DataLoader:
        """A loader that gives all ranks of a replica the same batches, and each replica its own.

        Args:
            dataset: the full dataset.
            batch_size: rows for each replica.
            shuffle, seed: whether rows are shuffled, in another order after each ``sampler.set_epoch``, and its seed.
            drop_last: whether to drop rows that don't fill a batch on all replicas.
            pin_memory, num_workers, kwargs: of ``torch.utils.data.DataLoader``.
            distributed_sampler_cls: replaces ``torch.utils.data.DistributedSampler``.

        Raises:
            ConfigError: the dataset has no length, or the loader is given a sampler, so that replicas can't share it.
        """
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise ConfigError(
                f"prepare_dataloader gives each replica its rows by their numbers, which a {type(dataset).__name__} "
                "doesn't have; make the loader yourself, of every plugin.dp_size-th row from plugin.coordinate.data on"
            )
        taken = sorted({"sampler", "batch_sampler"} & kwargs.keys())
        if taken:
            raise ConfigError(
                f"prepare_dataloader: {taken[0]} would replace the one that gives each replica its rows; give "
                "distributed_sampler_cls, a class that is made as torch's DistributedSampler is"
            )
        replica = self.coordinate.data
        sampler = (distributed_sampler_cls or DistributedSampler)(
            dataset, num_replicas=self.dp_size, rank=replica, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        # For random numbers in the loader's workers, which must be the same on all ranks of a replica.
        generator = torch.Generator().manual_seed(seed + replica)
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            **{"generator": generator, **kwargs},
        )

    def wait_for_checkpoint(self) -> bool:
        """Wait until an asynchronous save is done. Call it before the process group is destroyed. Collective.

        Returns:
            False if it could not be written and the config lets training continue.

        Raises:
            CheckpointError: it could not be written.
        """
        return self._model is None or self._model.checkpointing.wait()

    def supported_devices(self) -> list[str]:
        """Supported kinds of accelerators."""
        return ["cuda", "cpu"]

    def supported_precisions(self) -> list[str]:
        """Supported precisions of training."""
        return ["fp32", "bf16"]

    def control_precision(self) -> bool:
        """True: the config sets the precision."""
        return True

    def control_device(self) -> bool:
        """True: the model is moved to the accelerator's current device."""
        return True

    def support_no_sync(self) -> bool:
        """True; see :meth:`no_sync`."""
        return True

    def support_lora(self) -> bool:
        """True; see :meth:`enable_lora`."""
        return True

    def control_checkpoint_io(self) -> bool:
        """True: checkpoints are Cuboid's."""
        return True

    def get_checkpoint_io(self) -> CuboidCheckpointIO:
        """The object that writes and reads checkpoints."""
        return self._checkpoint_io

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
    ) -> nn.Module:
        """Shard the model, unless it is sharded, and put adapters into it. Call it before ``boost``, on all ranks.

        Args:
            model: plain or sharded.
            pretrained_dir: folder of PEFT's with adapters to train on; None for new ones.
            lora_config: PEFT's ``LoraConfig`` of new adapters.
            bnb_quantization_config: not supported.

        Returns:
            PEFT's model around the sharded one.

        Raises:
            CuboidError: the model can't be sharded so, or its layers have no rule for such adapters.
        """
        if bnb_quantization_config is not None:
            raise UnsupportedModelError(
                "enable_lora(quantize=True): quantised weights can't be cut once they are whole; leave it out, and "
                "take a model that cuboid.from_pretrained(…, quantization_config=BitsAndBytesConfig(load_in_4bit=True, "
                "…)) has loaded"
            )
        if self._model is not None:
            raise CuboidError("enable_lora comes before booster.boost, which takes the optimizer of the adapters")
        # PEFT takes seconds to import.
        from peft import PeftModel, get_peft_model

        def adapt() -> nn.Module:
            sharded = adopt_model(model, self.config)
            if pretrained_dir is None:
                return get_peft_model(sharded, lora_config)
            return PeftModel.from_pretrained(sharded, pretrained_dir, is_trainable=True)

        return run_on_all_ranks(adapt, what="booster.enable_lora")


def _cast(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    for parameter in parameters:
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
