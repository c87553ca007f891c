"""State layers: recurrent states of hybrid models, between the frames of a pool and the layers of transformers.

    begin    a step names a frame with the state of each row, and another frame for the state after it
    layers   get copies, since some of them change their state in place; what they hand over replaces a copy
    end      the copies are written to the frames for the new states

No frame is changed while a row names it, so rejected drafts, beams and interrupts need no copies: the old state is
still there. The host's kernels cannot save a state inside a pass. So patching.py computes a prompt in passes that end
where a state is kept; each row by itself, as the rows of a batch have their states at different columns. `crop` may
leave a row with tokens that have K and V and no state. They are computed again before the next pass (`owed`).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers.cache_utils import Cache

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers.geometry import state_name

UNPATCHED: Final = (
    "a PagedCache of a model with recurrent states needs patch(model): without it, the cache does not know where a "
    "forward pass begins"
)


class StepStates:
    """The states of one step, as copies. touched: the layers that have read or written theirs.

    layers: the tensors of each layer in the frames, see StateStorage. places: the number of a layer of the model there.
    batch:  the plan of the step.
    """

    def __init__(self, layers: list[dict[str, torch.Tensor]], places: dict[int, int], batch: Any) -> None:
        self._layers, self._places = layers, places
        frames = batch.plan.states.state_in
        self.has_previous = bool((frames >= 0).any())
        self._fresh = batch.states.state_in < 0 if self.has_previous and bool((frames < 0).any()) else None
        self._source = batch.states.state_in.clamp(min=0).long()
        self._target = batch.states.state_out.long()
        self._writes_all = bool((batch.plan.states.state_out >= 0).all())
        self._copies: dict[tuple[int, str], torch.Tensor] = {}
        self.touched: set[int] = set()

    @property
    def missing(self) -> set[int]:
        """Layers with a state that have neither read nor written it."""
        return set(self._places) - self.touched

    def read(self, layer: int, name: str) -> torch.Tensor | None:
        """Return the copy of one tensor of a layer, [B, ...]; None if no row has a state, or no state has the name."""
        self.touched.add(layer)
        if not self.has_previous or name not in self._layers[self._places[layer]]:
            return None
        if (layer, name) not in self._copies:
            copy = self._layers[self._places[layer]][name].index_select(0, self._source)
            if self._fresh is not None:
                copy[self._fresh] = 0
            self._copies[layer, name] = copy
        return self._copies[layer, name]

    def put(self, layer: int, name: str, state: torch.Tensor) -> torch.Tensor:
        """Replace the copy of one tensor of a layer, and return what replaces it, in the dtype of the frames."""
        if torch.is_grad_enabled() and state.requires_grad:
            raise InvalidRequest("states have no gradients; call the model under no_grad(), or with use_cache=False")
        self.touched.add(layer)
        if name not in self._layers[self._places[layer]]:
            raise InvalidRequest(f"layer {layer} keeps a {name} state that it did not keep of its first token")
        state = state.to(self._layers[self._places[layer]][name].dtype)
        self._copies[layer, name] = state
        return state

    def width(self, layer: int, name: str) -> int:
        """Return the size of the last dimension of a tensor."""
        return int(self._layers[self._places[layer]][name].shape[-1])

    def write(self) -> None:
        """Write the copies to the frames for the new states; a row without a token in the step has none."""
        target, rows = self._target, None
        if not self._writes_all:
            rows = (target >= 0).nonzero().view(-1)
            target = target[rows]
        for layer in self.touched:
            for name, frames in self._layers[self._places[layer]].items():
                state = self.read(layer, name) if (layer, name) not in self._copies else self._copies[layer, name]
                if state is None:
                    frames.index_fill_(0, target, 0)
                else:
                    frames.index_copy_(0, target, state if rows is None else state.index_select(0, rows))
        self._copies.clear()


class StateLayers(Cache):
    """The part of a PagedCache that linear layers call: what Cache offers them, over the frames of the step."""

    holdings: Any

    def _states(self, layer: int) -> StepStates:
        step = self.holdings.step
        states: StepStates | None = None if step is None or step.done else step.states
        if states is None:
            raise InvalidRequest(UNPATCHED)
        if layer not in states.touched:
            self.note_complete(layer)
        return states

    def note_complete(self, layer: int) -> None:
        """Raise InvalidRequest if a forward pass before has not computed `layer`."""
        raise NotImplementedError

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether a row has a state."""
        step = self.holdings.step
        return step is not None and step.states is not None and step.states.has_previous

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a copy of the last columns before a convolution, [B, C, width], or None before the first token."""
        return self._states(layer_idx).read(layer_idx, state_name("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a copy of the state of a recurrence, [B, ...], or None before the first token."""
        return self._states(layer_idx).read(layer_idx, state_name("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Keep the last columns of a convolution's input. Return all of it, with the columns before it.

        Shapes: conv_states [B, C, L]; returns [B, C, width + L], or without columns before it [B, C, max(width, L)]
        """
        states, name = self._states(layer_idx), state_name("conv", state_idx)
        before, width = states.read(layer_idx, name), states.width(layer_idx, name)
        if before is not None:
            whole = torch.cat([before, conv_states.to(before.dtype)], -1)
        else:
            whole = torch.nn.functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        states.put(layer_idx, name, whole[..., -width:])
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Keep the state of a recurrence, and return it."""
        return self._states(layer_idx).put(layer_idx, state_name("recurrent", state_idx), recurrent_states)
