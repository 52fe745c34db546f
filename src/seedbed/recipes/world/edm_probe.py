"""Probe of the diffusion model for the checks, by the code of training. B windows, N numbers."""

from torch import Tensor

from seedbed.recipes.world.edm import Denoiser, factors
from seedbed.recipes.world.memory import POSE
from seedbed.recipes.world.objective import open_window, rows_of
from seedbed.recipes.world.probe import field_targets_of, held_where_gradients_stop, in_rows, objective, pictures
from seedbed.train.probe import Batch, Probe


def open_probe(system: Denoiser, batch: Batch) -> Probe:
    """One denoising on true memories with training noise; the network's target is a mix of frame and noise."""
    window = open_window(rows_of(batch), system.layout)
    level_B, real_B = system.training_noise.levels(window)
    noisy, sigma_B = system.noised(window)
    opened = {**system.training_noise.context(window, real_B), "action": window.action_BA, "level": level_B, "noisy": noisy}
    return Probe(
        batch={**opened, "sigma": sigma_B, "target": window.target_B3HW},
        predict=lambda b: _predict_noise(system, b),
        objective=lambda y_BN, b: objective(system, y_BN, b["target"], _target(b)),
        oracle=lambda b: in_rows([_target(b), *field_targets_of(system, b["target"])]),
        lower_bound=0.0,
        dead=tuple(name for name, _ in system.named_parameters() if name.startswith("net.noise.")),  # the noise is in the frame
        held=held_where_gradients_stop(system, batch),
    )


def _target(b: Batch) -> Tensor:
    """The target of the network's output."""
    by = factors(b["sigma"])
    return (b["target"] - by.skip * b["noisy"]) / by.out


def _predict_noise(system: Denoiser, b: Batch) -> Tensor:
    seen = {name: b[name] for name in (*system.layout.names(), POSE) if name in b}
    outputs = system.denoise_with_output(b["noisy"], factors(b["sigma"]), seen, b["action"], b["level"])[1]
    return in_rows([outputs, *pictures(system, b)])
