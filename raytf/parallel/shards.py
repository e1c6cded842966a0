"""`shard_optimizer=True`: each worker keeps and updates its share of an optimizer's state (ZeRO stage 1).

S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020. The first half of
the ring's all-reduce gives each worker its share of the gradients. The second half copies the new parameters. A share
is a segment of the ring's sum, so results have the bits of a training without shares. See docs/design/ring.md.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from raytf import logs
from raytf.collectives import exchange, gradient_ring
from raytf.collectives.communicator import spans_workers
from raytf.compat import keras_objects
from raytf.compat.keras import TFOptimizer
from raytf.compat.lazy_array import LazyArray
from raytf.compat.patching import patch
from raytf.compat.tensorflow import may_record
from raytf.errors import ConfigError
from raytf.parallel import compiled_update, keras_optimizers, model_optimizers
from raytf.parallel import step as step_module
from raytf.parallel.sparse_rows import PartOfVariable

logger = logs.get_logger(__name__)
# Optimizers that compute each number of a variable from the same numbers of its gradient and its slots.
_OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "RMSprop", "SGD")
_OPTIONS = ("clipnorm", "global_clipnorm", "use_ema", "gradient_accumulation_steps", "loss_scale_factor")
_OPTIONS += ("centered",)  # of RMSprop, whose difference of products XLA rounds differently in arrays of other sizes
# Whether it is in force in this process; set by each training.
enabled = False


class OptimizerShards:
    """This worker's share of the state of one optimizer.

    Args:
        model: The model that the optimizer trains.
        ring: The `GradientRing` of the workers.

    Attributes:
        slots: (share of a slot, its trained variable) by the id of the share.
    """

    def __init__(self, model, ring: gradient_ring.GradientRing):
        self._model, self._optimizer, self._ring = weakref.ref(model), weakref.ref(model.optimizer), ring
        self.slots: dict[int, tuple] = {}
        self._serves = False  # whether other workers send their shares on request
        self._next: int | None = None  # the slot that all workers gather next, while each writes a part

    @functools.cached_property
    def variables(self) -> list:
        """The variables whose state is shared out, once the optimizer is built: all but tables of `Embedding`s."""
        layers = keras_objects.layers_of(self._model())
        tables = {id(keras_objects.table_of(layer)) for layer in layers}
        trained = keras_objects.variables_of_optimizer(self._optimizer())
        return [v for v in trained if id(v) not in tables and not getattr(v, "overwrite_with_gradient", False)]

    @functools.cached_property
    def _bounds(self) -> dict[int, tuple[int, int]]:
        """(begin, end) of this worker's share of each variable, by its id."""
        packs = self._ring.packs(self._specs())
        bounds_by_index = [
            (i, bounds) for pack in packs for i, bounds in zip(pack.indices, self._ring.bounds(pack), strict=True)
        ]
        return {id(self.variables[i]): bounds for i, bounds in bounds_by_index}

    def _specs(self) -> list[tf.TensorSpec]:
        return [tf.TensorSpec(v.shape, v.dtype) for v in self.variables]

    def has(self, variable) -> bool:
        """Returns whether the state of a trained variable is shared out."""
        return id(variable) in self._bounds

    # ------------------------------------------------------------------------------------------ a step

    def slot(self, variable, name: str | None, initializer) -> keras.Variable:
        """Returns a new slot of the size of this worker's share of a trained variable."""
        begin, end = self._bounds[id(variable)]
        path = f"{variable.path.replace('/', '_')}_{name or 'var'}"
        self._ring.initializes_locally = True  # shares have other sizes on other workers
        try:
            made = self._optimizer().add_variable((end - begin,), initializer, variable.dtype, name=path)
        finally:
            self._ring.initializes_locally = False
        self.slots[id(made)] = made, variable
        return made

    def update(self, grads: Sequence, variables: Sequence) -> tuple[list, list]:
        """Updates the variables whose state is shared out; returns (gradients, variables) of the others.

        Raises:
            ConfigError: A gradient is of some rows only, or no tape's own result.
        """
        step, given = step_module.current(), {id(v): g for g, v in zip(grads, variables, strict=True)}
        gradients = [given.get(id(v)) for v in self.variables]
        for gradient, variable in zip(gradients, self.variables, strict=True):
            if gradient is not None and (step is None or not step.is_local(gradient)):
                raise ConfigError(
                    "With shard_optimizer the optimizer gets dense gradients directly from the tape of Keras' own "
                    "train_step",
                    f"another gradient of {variable.path}",
                    "Leave shard_optimizer out, or what changes gradients or takes rows of a variable that is of no "
                    "keras.layers.Embedding",
                )
        locals_ = [keras_optimizers.local_variable(v) for v in self.variables]
        pairs = zip(gradients, locals_, strict=True)
        filled = [tf.zeros_like(v) if g is None else tf.ensure_shape(g, v.shape) for g, v in pairs]
        summed, _ = self._ring.sum(filled, step.rows, last=False, shares=True)
        bounds = [self._bounds[id(v)] for v in self.variables]
        values = [tf.reshape(v, [-1])[begin:end] for v, (begin, end) in zip(locals_, bounds, strict=True)]
        used = [i for i, (begin, end) in enumerate(bounds) if gradients[i] is not None and begin < end]
        with step_module.override_state(reduced=True, inline_merge=True):
            inputs = [(tf.ensure_shape(summed[i], values[i].shape), values[i]) for i in used]
            has_rows = any(isinstance(g, tf.IndexedSlices) for g in grads)
            updated = self._updated([self.variables[i] for i in used], inputs, has_rows)
            for i, value in zip(used, updated, strict=True):
                values[i] = value
            for variable, value in zip(locals_, self._ring.join(values, self._specs()), strict=True):
                variable.assign(value)
            for variable in self.variables:
                if variable.constraint is not None:
                    variable.assign(variable.constraint(variable))
        others = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None and not self.has(v)]
        return [g for g, _ in others], [v for _, v in others]

    def _updated(self, variables: Sequence, inputs: Sequence[tuple], has_rows: bool) -> Sequence[tf.Tensor]:
        """Returns the new values of shares of variables from their (gradient, value).

        XLA compiles what it does without shares, as it may round differently in other computations.

        Args:
            variables: The variables.
            inputs: (gradient, value) of each share.
            has_rows: Whether other variables have gradients of some rows: clipping and decay are not compiled then.
        """
        optimizer = self._optimizer()
        if has_rows:
            inputs = [self._decayed(v, *pair) for v, pair in zip(variables, inputs, strict=True)]
            update = lambda i, gradient, value: self._update(variables[i], gradient, value)
        else:
            update = lambda i, *pair: self._update(variables[i], *self._decayed(variables[i], *pair))
        if not compiled_update.is_possible(optimizer, list(zip(inputs, variables, strict=True))):
            return [update(i, *pair) for i, pair in enumerate(inputs)]
        if has_rows or compiled_update.compiles_as_one(self.variables):
            whole = lambda _, *flat: [update(i, *flat[2 * i : 2 * i + 2]) for i in range(len(inputs))]
            flat = tuple(tensor for pair in inputs for tensor in pair)
            return compiled_update.compile_per_kind(optimizer, ["all"], whole, [flat], lambda _: [])[0]
        decays = [keras_objects.decays(optimizer, v) for v in variables]
        kinds = [(v.dtype, pair[1].shape[0], d) for v, pair, d in zip(variables, inputs, decays, strict=True)]
        handles = lambda i: [slot.handle for slot in self._slots_of(variables[i]).values()]
        return compiled_update.compile_per_kind(optimizer, kinds, update, inputs, handles)

    def _slots_of(self, variable) -> dict:
        begin, end = self._bounds[id(variable)]
        slots = keras_objects.slots_of(self._optimizer(), variable, (end - begin,))
        return {name: keras_optimizers.local_variable(slot) for name, slot in slots.items()}

    def _decayed(self, variable, gradient: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the clipped gradient and the decayed value of a share, by Keras' formulas."""
        optimizer = self._optimizer()
        if optimizer.clipvalue is not None:
            gradient = keras.ops.clip(gradient, -optimizer.clipvalue, optimizer.clipvalue)
        if optimizer.weight_decay is not None and keras_objects.decays(optimizer, variable):
            decay, rate = tf.cast(optimizer.weight_decay, value.dtype), tf.cast(optimizer.learning_rate, value.dtype)
            value -= value * decay * rate
        return gradient, value

    def _update(self, variable, gradient: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        """Returns the new value of a share by Keras' own `update_step`."""
        optimizer = self._optimizer()
        share = PartOfVariable(value, keras_objects.key_of(optimizer, variable))
        with keras_objects.with_slots(optimizer, variable, self._slots_of(variable)):
            optimizer.update_step(gradient, share, optimizer.learning_rate)
        return share.value

    # ------------------------------------------------------------------------------------------ checkpoints

    def save(self, store) -> None:
        """Replaces `save_own_variables`: writes whole slots, which other workers send as they are copied."""
        for i, variable in enumerate(self._optimizer().variables):
            store[str(i)] = self._whole(variable) if id(variable) in self.slots else variable

    def _whole(self, slot) -> LazyArray:
        _, variable = self.slots[id(slot)]
        number = list(self.slots).index(id(slot))
        dtype = tf.as_dtype(slot.dtype).as_numpy_dtype
        return LazyArray(tuple(variable.shape), np.dtype(dtype), lambda: self._gathered(number))

    def _gathered(self, number: int) -> np.ndarray:
        if self._next is not None:
            return self._gather_up_to(number)
        if not self._serves:
            raise ConfigError(
                "With shard_optimizer each worker has its share of the optimizer's state, and raytf's own checkpoints "
                "have all of it",
                "a callback, or other code of one worker, that saves the model with its optimizer",
                "Use raytf.load_model on a checkpoint of the run, or save model.get_weights()",
            )
        self._exchange(number + 1)
        return self._shared(number)

    def _shared(self, number: int) -> np.ndarray:
        slot, variable = list(self.slots.values())[number]
        return self._ring.whole(np.asarray(slot)).reshape(tuple(variable.shape))

    def _gather_up_to(self, number: int) -> np.ndarray:
        """Returns a whole slot; gathers those before it as well, which others may write. No slot is gathered twice."""
        if number < self._next:
            raise RuntimeError(f"slot {number} of the optimizer follows slot {self._next - 1} in the model's file")
        while True:
            slot = self._shared(self._next)
            self._next += 1
            if self._next > number:
                return slot

    def _exchange(self, number: int) -> int:
        """Returns the sum of all workers' numbers, of which one worker's is not 0."""
        with exchange.collective_phase():
            return int(self._ring.all_reduce_arrays([np.array([number])])[0][0])

    @contextlib.contextmanager
    def gather_full_state(self, rank: int) -> Iterator[None]:
        """Sends whole slots to the worker `rank` within the context, one at a time: no worker holds the state twice."""
        self._serves = self._ring.ring.rank == rank
        end = len(self.slots) + 1
        try:
            yield
        finally:
            if self._serves:
                self._serves = False
                self._exchange(end)
        if self._ring.ring.rank != rank:
            while (number := self._exchange(0)) != end:
                self._shared(number - 1)

    @contextlib.contextmanager
    def gather_full_state_on_all(self) -> Iterator[None]:
        """Gathers each slot on all workers within the context, and each worker copies what it writes."""
        self._next = 0
        try:
            yield
        finally:
            try:
                if self._next < len(self.slots):
                    self._gather_up_to(len(self.slots) - 1)
            finally:
                self._next = None

    def load(self, store) -> None:
        """Replaces `load_own_variables`: takes this worker's share of whole slots.

        Raises:
            ValueError: They are of another optimizer or model.
        """
        variables = self._optimizer().variables
        if len(store.keys()) != len(variables):
            raise ValueError(f"the optimizer has {len(variables)} variables, and the file {len(store.keys())}")
        for i, variable in enumerate(variables):
            value = store[str(i)]
            if id(variable) in self.slots:
                _, trained = self.slots[id(variable)]
                if tuple(value.shape) != tuple(trained.shape):
                    raise ValueError(f"{variable.path} has the shape {tuple(trained.shape)}, and {tuple(value.shape)}")
                begin, end = self._bounds[id(trained)]
                value = np.asarray(value).reshape(-1)[begin:end]
            variable.assign(value)


def attach(model, strategy) -> None:
    """Shards the state of a compiled model's optimizer if that is enabled; call it before the model is built.

    Args:
        model: A compiled `keras.Model`.
        strategy: Its strategy.

    Raises:
        ConfigError: The model or its optimizer does not allow it.
    """
    if not enabled:
        return
    if not spans_workers(strategy):
        logger.info("shard_optimizer has no effect on one worker, which has the whole state of the optimizer")
        return
    ring, optimizers = gradient_ring.ring_of(strategy), model_optimizers.optimizers_of(model)
    optimizer = model.optimizer
    received = []
    if ring is None:
        received.append("workers that exchange through TensorFlow's collectives, as with GPUs")
    if list(optimizers) != ["optimizer"] or model_optimizers.decides_itself(model):
        received.append("a model with its own fit or train_step, or several optimizers")
    elif not keras_optimizers.is_one_of(optimizer, _OPTIMIZERS):
        received.append(f"{type(optimizer).__name__} ({type(optimizer).__module__})")
    else:
        received += [f"{name}={value}" for name in _OPTIONS if (value := getattr(optimizer, name, None))]
        received += ["an optimizer that is built already"] if optimizer.built else []
    if received:
        raise ConfigError(
            f"shard_optimizer is for raytf's ring, Keras' own train_step, and one of Keras' own "
            f"{', '.join(_OPTIMIZERS)} without {', '.join(_OPTIONS)}",
            ", ".join(received),
            "Use one of them, or leave shard_optimizer out",
        )
    shares = vars(optimizer)[model_optimizers.SHARES] = OptimizerShards(model, ring)
    vars(optimizer).update(save_own_variables=shares.save, load_own_variables=shares.load)


def shares_of(optimizer) -> OptimizerShards | None:
    """Returns this worker's share of an optimizer's state, or None if it has all of it."""
    return vars(optimizer).get(model_optimizers.SHARES)


def in_step(model, replica_step):
    """Returns a replica's training step whose tape leaves gradients to an optimizer with shares."""
    if not has_shards(model):
        return replica_step

    def step(data):
        with step_module.override_state(shares=shares_of(model.optimizer)):
            return replica_step(data)

    return step


def has_shards(model) -> bool:
    """Returns whether this worker has a share of the state of a model's optimizer."""
    return model.optimizer is not None and shares_of(model.optimizer) is not None


def sharded_variables(model) -> list:
    """Returns the trained variable of each slot that is shared out; the whole slot is as large."""
    return [variable for _, variable in shares_of(model.optimizer).slots.values()] if has_shards(model) else []


def gather_full_state(model, rank: int = 0, writers: int = 1) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which workers can save a checkpoint of a model; every worker enters it.

    Args:
        model: A compiled and built `keras.Model`.
        rank: The worker that saves it, if that is one. The others send their shares until it leaves the context.
        writers: Number of workers that save parts of it. With several, each saves at most one part.
    """
    if not has_shards(model):
        return contextlib.nullcontext()
    shares = shares_of(model.optimizer)
    return shares.gather_full_state_on_all() if writers > 1 else shares.gather_full_state(rank)


@patch((TFOptimizer, "add_variable_from_reference"))
def add_variable_from_reference(original, self, reference_variable, name=None, initializer="zeros"):
    """Replaces `TFOptimizer.add_variable_from_reference`: a slot has the size of this worker's share."""
    shares = shares_of(self)
    if shares is None or not shares.has(reference_variable):
        return original(self, reference_variable, name=name, initializer=initializer)
    return shares.slot(reference_variable, name, initializer)


def left_to_optimizer(step, model_sources: Sequence, grads: Sequence) -> set[int]:
    """Returns the indices of a tape's gradients that the optimizer sums to shares, and notes them in the step.

    Only those of a step's outermost tape are: gradients that a layer or a loss computes are summed at once.
    """
    shares = getattr(step_module.state, "shares", None)
    if shares is None or may_record() or step.is_nested():
        return set()
    indices = {i for i, v in enumerate(model_sources) if isinstance(grads[i], tf.Tensor) and shares.has(v)}
    for i in indices:
        step.note_local(grads[i])
    return indices
