"""The projected step of the published model on many devices, with its error on published runs beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onboarding.architecture import Architecture
from onboarding.devices import Device
from onboarding.stages.scale.result import Layout, Mode, Part, Projection, ScalingPoint, UnevenPoint
from onboarding.stages.throughput.result import ThroughputResult
from onboarding.step_time.hardware import System
from onboarding.step_time.predict import Prediction, predict, stored
from onboarding.step_time.terms import Setting
from onboarding.step_time.work import Work, part_of

EXCHANGE = "all-to-all"


def setting(
    work: Work,
    system: System,
    mode: Mode,
    *,
    devices: int,
    per_node: int,
    ep: int,
    microbatch: int,
    batch: int,
    tokens: int,
) -> Setting:
    """What our runtime does: everything sharded over all ranks, every block recomputed, bfloat16."""
    return Setting(
        work=work,
        system=system,
        precision="bf16",
        gpus=devices,
        gbs=batch,
        mbs=microbatch,
        seq=tokens,
        fsdp=devices,
        ep=ep,
        adapters=mode == "adapters",
        recompute=True,
        per_node=per_node,
    )


def trial_factor(
    architecture: Architecture, work: Work, system: System, measured: ThroughputResult | None
) -> tuple[float, str]:
    """Measured over projected step of the slice that was trained on this very kind of device.

    Returns:
        The factor, and where it comes from in words; 1 and nothing without such a run.
    """
    if measured is None or measured.trained != "slice" or system.key not in measured.device.upper():
        return 1.0, ""
    if "experts" in measured.sizes:
        return 1.0, "the slice holds fewer experts than the model, so its time does not correct the projection"
    layers = {row.block: row.layers for row in measured.breakdown if row.block is not None}
    piece = part_of(architecture, work, layers)
    one = Setting(
        work=piece,
        system=system,
        precision="bf16",
        gpus=1,
        gbs=measured.batch,
        mbs=measured.batch,
        seq=measured.sequence_length,
        adapters=measured.adapters,
        recompute=True,
    )
    run = measured.runs[-1]
    factor = run.step_ms / 1e3 / predict([one])[0].seconds
    return factor, (
        f"corrected by a trial run: {piece.layers} layers of the published width on {measured.device} {run.name} took "
        f"{factor:.2f} x the projected time"
    )


def fill(layouts: Sequence[Layout], settings: Sequence[Setting], trial: float) -> list[Prediction]:
    """Predict every layout and write what matters into its row."""
    predictions = predict(settings, trial=trial)
    for row, one, found in zip(layouts, settings, predictions, strict=True):
        if row.fits:
            row.step_s = found.seconds
            row.tokens_per_second_per_device = one.tokens / found.seconds
            row.all_to_all_share = found.parts[EXCHANGE] / found.seconds
    return predictions


def project(
    chosen: Setting,
    found: Prediction,
    curve: list[ScalingPoint],
    device: Device,
    *,
    trial: tuple[float, str],
) -> Projection:
    """The projection of the chosen layout."""
    tokens_per_second = chosen.tokens / found.seconds
    factor = 2.0 if chosen.adapters else 3.0
    tflops = factor * chosen.work.forward(chosen.seq) * tokens_per_second / 1e12
    low, high = spread()
    return Projection(
        step_s=found.seconds,
        low_s=found.seconds / (1 + high),
        high_s=found.seconds * (1 + high),
        tokens_per_second_per_device=tokens_per_second,
        tflops_per_device=tflops,
        mfu=tflops / device.peak_tflops,
        all_to_all_share=found.parts[EXCHANGE] / found.seconds,
        parts=[
            Part(name=name, seconds=seconds, share=seconds / found.seconds)
            for name, seconds in sorted(found.parts.items(), key=lambda item: -item[1])
            if seconds > 0
        ],
        curve=curve,
        uneven=uneven(chosen, trial[0]),
        correction=trial[0],
        basis=[*basis(low, high), *([trial[1]] if trial[1] else ["no trial run on such a device corrects it"])],
    )


def uneven(chosen: Setting, trial: float) -> list[UnevenPoint]:
    """The step at some loads of the busiest expert rank; none where no rank waits for another's experts."""
    if not chosen.work.experts or chosen.ep == 1:
        return []
    loads = (1.25, 1.5, 2.0)
    found = predict([replace(chosen, imbalance=load) for load in loads], trial=trial)
    return [UnevenPoint(imbalance=load, step_s=one.seconds) for load, one in zip(loads, found, strict=True)]


def spread() -> tuple[float, float]:
    """Median and 90th percentile of the error for a runtime that nothing was fitted on, as ours is."""
    errors = stored()["errors"]["unseen stack"]
    return float(errors["median"]), float(errors["p90"])


def basis(median: float, high: float) -> list[str]:
    """Where the figures come from."""
    data = stored()
    model = data["errors"]["unseen model"]
    return [
        "a projection, not a measurement: operator times from FLOPs and bytes at fitted shares of published rates, "
        "links by their rates and fitted exposure, routing as even as the busiest rank is loaded (here: even)",
        f"fitted on {data['runs']} published runs; held out, its step times are off by {model['median']:.0%} (median, "
        f"90th percentile {model['p90']:.0%}) for a model that it has not seen",
        f"and by {median:.0%} (90th percentile {high:.0%}) for a runtime that it has not seen, as ours; the range is "
        "that 90th percentile",
    ]


@dataclass(frozen=True, kw_only=True)
class Point:
    """The best layout at one number of devices."""

    devices: int
    usable: int
    """Devices that the setting is of; the others stand idle."""
    layout: Layout
    setting: Setting
    prediction: Prediction


def scaling(points: Sequence[Point]) -> list[ScalingPoint]:
    """The curve over numbers of devices, against the first one's tokens a second and device."""
    rows: list[ScalingPoint] = []
    for point in points:
        seconds = point.prediction.seconds
        rate = point.setting.tokens / seconds * point.usable / point.devices
        first = rows[0].tokens_per_second_per_device if rows else rate
        rows.append(
            ScalingPoint(
                devices=point.devices,
                usable=point.usable,
                ep=point.layout.ep,
                step_s=seconds,
                tokens_per_second_per_device=rate,
                efficiency=rate / first,
                all_to_all_share=point.prediction.parts[EXCHANGE] / seconds,
                fits=point.layout.fits,
            )
        )
    return rows
