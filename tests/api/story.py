"""A made-up job told through the Store, step by step, as a worker would: for tests of what shows it."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from onboarding.architecture import Architecture, BlockKind, Census
from onboarding.artifacts import ArtifactStore
from onboarding.context import StageResult
from onboarding.pipeline import JobOptions
from onboarding.records import Job, Step
from onboarding.settings import Settings
from onboarding.stages.align.result import AlignResult, Curves, LayerError
from onboarding.stages.gaps.result import Coverage, GapsResult, OperatorRow, Roofline
from onboarding.stages.generate.result import GenerateResult
from onboarding.stages.intake.result import IntakeResult
from onboarding.stages.judge.result import CaseReport, JudgeResult, TensorError
from onboarding.stages.package.result import PackageResult
from onboarding.stages.parse.result import ParseResult
from onboarding.stages.scale.result import (
    Budget,
    CollectiveRow,
    DryRank,
    GlooRun,
    Group,
    Hardware,
    Layout,
    ModePlan,
    Part,
    Projection,
    ScaleResult,
    ScalingPoint,
    UnevenPoint,
)
from onboarding.stages.throughput.result import LayerTime, RooflinePoint, ThroughputResult, Training
from onboarding.store import NewEvent, Store, log_path
from onboarding.weights.result import PatternRow, WeightsReport

RUNNER = "story"
HOSTILE = "<script>alert(1)</script>"
"""Shown wherever a definition or a log may put text; must come out as text."""
DIGESTS = {
    "linear attention KDA, 32 heads, 128 x 128": hashlib.sha256(b"kda").hexdigest(),
    "routed experts, 256 of 2304 x 1024, top 8": hashlib.sha256(b"moe").hexdigest(),
    "gated norm, sigmoid, 128": hashlib.sha256(b"norm").hexdigest(),
}
SOURCE = f'''"""Generated for exactly one operator. {HOSTILE}"""

FAMILY = "norm"


def forward(tensors, config):
    """Normalise rows of ``x``."""
    rows = tensors["x"].shape[0]  # one program takes many rows
    return {{"y": rows * 2}}, {{}}
'''


class Story:
    """One job and the means to move it on."""

    def __init__(self, store: Store, artifacts: ArtifactStore, settings: Settings, owner: str, name: str) -> None:
        self.store, self.artifacts, self.settings = store, artifacts, settings
        definition = artifacts.put(b"{}", name="config.json", media_type="application/json")
        self.job: Job = store.create_job(
            name=name,
            model_type="kimi_linear",
            owner=owner,
            definition=definition.digest,
            options=JobOptions(profile="quick"),
        )

    @property
    def id(self) -> str:
        """The job's id."""
        return self.job.id

    def step(self, stage: str, key: str = "") -> Step:
        """The newest attempt of a step."""
        return [step for step in self.store.steps(self.id) if (step.stage, step.key) == (stage, key)][-1]

    def begin(self, stage: str, key: str = "") -> None:
        """Claim a step and write its first log line."""
        step = self.step(stage, key)
        assert step.id is not None
        assert self.store.claim_step(step.id, RUNNER, 3600.0) is not None
        self.log(stage, f"{stage} begins", key)

    def log(self, stage: str, line: str, key: str = "") -> None:
        """Append a line to a step's log."""
        path = log_path(self.settings, self.id, stage, key, self.step(stage, key).attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(line + "\n")

    def progress(self, stage: str, done: float, total: float, label: str, key: str = "") -> None:
        """Report progress."""
        data = {"done": done, "total": total, "label": label}
        self.store.append_events(self.id, [NewEvent(kind="progress", data=data, stage=stage, key=key)])

    def metrics(self, *points: tuple[str, int, float]) -> None:
        """Points (series, step, value) of align's live curves."""
        data = [{"series": series, "step": step, "value": value} for series, step, value in points]
        self.store.append_events(self.id, [NewEvent(kind="metric", data=item, stage="align") for item in data])

    def end(self, stage: str, result: StageResult, key: str = "") -> None:
        """Finish a step with a result."""
        step = self.step(stage, key)
        assert step.id is not None
        assert self.store.finish_step(step.id, RUNNER, "succeeded", result=result.model_dump()) is not None

    def skip(self, stage: str, reason: str, key: str = "") -> None:
        """Finish a step as skipped."""
        step = self.step(stage, key)
        assert step.id is not None
        skipped = {"outcome": "skipped", "summary": reason}
        assert self.store.finish_step(step.id, RUNNER, "skipped", result=skipped) is not None

    def fail(self, stage: str, problem: dict[str, Any], key: str = "") -> None:
        """Finish a step as failed."""
        step = self.step(stage, key)
        assert step.id is not None
        assert self.store.finish_step(step.id, RUNNER, "failed", problem=problem) is not None

    def do(self, stage: str, result: StageResult, key: str = "") -> None:
        """Begin and end a step."""
        self.begin(stage, key)
        self.log(stage, result.summary, key)
        self.end(stage, result, key)

    def save(self, stage: str, name: str, content: bytes, media_type: str, key: str = "") -> Any:
        """Store an artifact under the job."""
        ref = self.artifacts.put(content, name=name, media_type=media_type)
        self.store.append_events(self.id, [NewEvent(kind="artifact", data=ref.model_dump(), stage=stage, key=key)])
        return ref

    # ---- whole chapters ------------------------------------------------------------------------------------------

    def tell_until_gaps(self) -> None:
        """Intake, parse, gaps."""
        self.do("intake", intake_result(self))
        parsed = ParseResult(
            architecture=architecture(),
            weights=weights_report(),
            seconds=6.1,
            summary="27 layers: 20 KDA + 7 MLA",
        )
        self.do("parse", parsed)
        self.do("gaps", gaps_result())

    def tell_kernels(self) -> None:
        """Generate, judge and skip tune, for every operator."""
        for words, key in DIGESTS.items():
            candidate = self.save("generate", "candidate.py", SOURCE.encode(), "text/x-python", key)
            generated = GenerateResult(
                spec={"family": "norm"},
                words=words,
                candidate=candidate,
                template="kernel_templates/norm/template.py sha256 " + "0" * 64,
                lines=SOURCE.count("\n"),
                kernels=["forward_kernel", "backward_kernel"],
                entry={"forward": "forward", "backward": "backward"},
                summary=f"{SOURCE.count(chr(10))} lines",
            )
            self.do("generate", generated, key)
        for key in DIGESTS.values():
            self.do("judge", judge_result(key), key)
            self.begin("tune", key)
            self.skip("tune", "no GPU here", key)

    def tell_align(self) -> None:
        """Alignment with its live curve."""
        self.begin("align")
        result = align_result()
        curves = result.curves
        for series, values in (("reference", curves.reference), ("candidate", curves.candidate)):
            self.metrics(*((series, step, value) for step, value in zip(curves.steps, values, strict=True)))
        self.end("align", result)

    def tell_speed(self) -> None:
        """Throughput and scale."""
        self.do("throughput", throughput_result())
        self.do("scale", scale_result())

    def tell_package(self) -> None:
        """The bundle."""
        self.begin("package")
        bundle = self.save("package", "bundle.tar.gz", b"not really an archive", "application/gzip")
        report = self.save("package", "report.html", f"<h1>{HOSTILE}</h1>".encode(), "text/html")
        result = PackageResult(
            bundle=bundle,
            bundle_name="kimi-linear-0.1.0",
            report=report,
            kernels=list(DIGESTS.values()),
            public_key="ab" * 32,
            manifest_sha256="cd" * 32,
            summary="bundle signed",
        )
        self.end("package", result)

    def tell(self) -> Story:
        """The whole job."""
        self.tell_until_gaps()
        self.tell_kernels()
        self.tell_align()
        self.tell_speed()
        self.tell_package()
        return self


def intake_result(story: Story) -> IntakeResult:
    """A checked definition."""
    definition = story.save("intake", "definition.tar", b"tar", "application/x-tar")
    return IntakeResult(
        name="kimi-linear",
        model_type="kimi_linear",
        source="example",
        digest="9f" * 32,
        definition=definition,
        config={"model_type": "kimi_linear"},
        files=["config.json"],
        has_code=False,
        has_tokenizer=False,
        summary="config only, digest 9f9f",
    )


def architecture() -> Architecture:
    """A small record of a hybrid model with round numbers."""
    strip = "".join("M" if i % 4 == 3 else "K" for i in range(27))
    common = {"feed_forward": "MoE 256 experts, top 8, 1 shared", "flops": 2e12, "bytes_moved": 3e9}
    blocks = [
        BlockKind(
            letter="K",
            mixer="KDA",
            layers=[i for i, letter in enumerate(strip) if letter == "K"],
            parameters=1_800_000_000,
            active_parameters=110_000_000,
            sequence_dependent=True,
            sparse_memory_access=True,
            **common,
        ),
        BlockKind(
            letter="M",
            mixer=f"MLA {HOSTILE}",
            layers=[i for i, letter in enumerate(strip) if letter == "M"],
            parameters=1_700_000_000,
            active_parameters=100_000_000,
            sequence_dependent=False,
            sparse_memory_access=True,
            **common,
        ),
    ]
    census = Census(
        total=49_100_000_000,
        active=3_000_000_000,
        by_role={"routed experts": 46_000_000_000, "attention": 2_000_000_000, "embedding": 1_100_000_000},
        tied_embeddings=False,
        fp32_parameters=1000,
    )
    return Architecture(
        name="kimi-linear",
        model_type="kimi_linear",
        class_name="KimiLinearForCausalLM",
        sequence_length=8192,
        hidden_size=2304,
        vocab_size=163840,
        num_layers=27,
        strip=strip,
        blocks=blocks,
        census=census,
        graph=[],
        uses=[],
        warnings=[f"untied embeddings {HOSTILE}"],
    )


def weights_report() -> WeightsReport:
    """An index with something missing, and names that mean harm."""
    row = PatternRow(
        target="model.x", sources=f"x{HOSTILE}", how="renamed", stored="fp8 in blocks", parameters=7, tensors=7
    )
    return WeightsReport(
        files=3,
        tensors=9,
        total_bytes=2**40,
        placed=7,
        expected=8,
        rows=[row],
        missing=["model.norm.weight"],
        extra=[f"mtp.{HOSTILE}"],
        proven="all 9 tensors of the twin came back bit for bit",
    )


def gaps_result() -> GapsResult:
    """Three gaps and one operator that torch serves."""
    rows = [
        OperatorRow(
            digest=digest,
            name=words,
            role="block",
            family="norm",
            calls=20,
            flops=1e13,
            bytes_moved=1e10,
            floor_ms=1.0,
            provider="transformers eager",
            provider_ms=4.0,
            basis="assumed 25 % of the roofline",
            share_flops=0.2,
            share_bytes=0.2,
            share_time=0.2,
            gain=0.14,
            intensity=1000.0,
            bound="compute",
            gap=True,
        )
        for words, digest in DIGESTS.items()
    ]
    served = rows[0].model_copy(
        update={"digest": "", "name": "linear", "provider": "torch linear", "gap": False, "share_time": 0.4}
    )
    return GapsResult(
        target="h200",
        sequence_length=8192,
        rows=[*rows, served],
        gaps=list(DIGESTS.values()),
        step_ms=20.0,
        coverage=[
            Coverage(provider="transformers eager", operators=3, share_time=0.6, share_flops=0.6, fast=False),
            Coverage(provider=f"torch {HOSTILE}", operators=1, share_time=0.4, share_flops=0.4, fast=True),
        ],
        roofline=Roofline(tflops=685.0, bandwidth=4.27, basis="measured"),
        summary="3 operator specs without a fast provider: 60 % of the step",
    )


def judge_result(candidate: str) -> JudgeResult:
    """An accepted verdict."""
    errors = [
        TensorError(tensor=tensor, error=share * 8e-3, tolerance=8e-3, share=share, reference_error=5e-3)
        for tensor, share in (("o", 0.41), ("grad q", 0.71), ("grad g", 0.33))
    ]
    cases = [
        CaseReport(
            name=name,
            dims={"T": tokens, "H": 2},
            dtype="bfloat16",
            distribution=distribution,
            passed=True,
            errors=errors,
            checks={"inputs unchanged": True, "outputs fresh": True},
            sensitivity={"zeros": 125.0, "sign flip": 250.0},
            seconds=0.8,
        )
        for name, tokens, distribution in (
            ("boundary", 64, "normal"),
            ("odd tail", 77, "normal"),
            ("large", 96, "wide"),
        )
    ]
    return JudgeResult(
        spec={"family": "norm"},
        candidate=candidate,
        level="interpreted",
        device="cpu",
        triton="3.6.0",
        torch="2.13.0",
        seed=7,
        cases=cases,
        worst_share=0.71,
        worst_where="grad q in odd tail",
        sandbox="bubblewrap",
        outcome="accepted",
        summary="accepted, worst 0.71 of tolerance",
    )


def align_result() -> AlignResult:
    """Five layers and thirty steps inside the band."""
    steps = list(range(30))
    reference = [5.545 * math.exp(-step / 25) + 0.05 * math.sin(step) for step in steps]
    layers = [
        LayerError(
            name=f"layers.{layer}",
            kind=kind,
            layer=layer,
            block="K",
            p50=1e-7,
            p99=4e-7 * (layer + 1),
            maximum=2e-6,
            rms=2e-7,
            tolerance=5e-6,
            share=0.04 * (layer + 1),
        )
        for layer in range(5)
        for kind in ("output", "gradient")
    ]
    return AlignResult(
        twin={"layers": 4, "hidden": 64, "tokens": 72},
        device="cpu",
        dtype="float32",
        layers=layers,
        curves=Curves(
            steps=steps,
            reference=reference,
            candidate=[value + 1e-3 * math.cos(step) for step, value in zip(steps, reference, strict=True)],
            band=[0.05] * 30,
            band_basis="spread of the reference between fp32 and fp64",
        ),
        worst_share=0.2,
        worst_where="layers.4",
        inside_band=True,
        p_value=0.63,
        swapped=dict.fromkeys(DIGESTS.values(), 4),
        corpus="Python's standard library, byte level",
        seconds=96.4,
        summary="30 steps inside the band (p = 0.63)",
    )


def throughput_result() -> ThroughputResult:
    """Two runs, with everything that a result may hold."""
    runs = [
        Training(
            name=name,
            tokens_per_second=rate,
            step_ms=8192 / rate * 1e3,
            fastest_ms=8000 / rate * 1e3,
            slowest_ms=9000 / rate * 1e3,
            steps=8,
            tflops=100.0,
            mfu=0.1,
            peak_bytes=2**30,
            first_loss=11.9,
            last_loss=11.2,
            kernels=kernels,
        )
        for name, rate, kernels in (("without the bundle", 1000.0, 0), ("with the bundle", 1250.0, 12))
    ]
    kind = f"K: KDA, MoE 256 experts, top 8, 1 shared {HOSTILE}"
    return ThroughputResult(
        trained="slice",
        words=f"slice of the published width: layers 4 {HOSTILE}",
        sizes={"layers": 4},
        device="NVIDIA H200",
        dtype="bfloat16",
        adapters=True,
        batch=1,
        sequence_length=8192,
        flops_per_token=2e10,
        runs=runs,
        speedup=1.25,
        breakdown=[
            LayerTime(kind=kind, block=0, layers=3, forward_ms=20.0, backward_ms=45.0, share=0.7,
                      parts={"mixer": 12.0, "feed-forward": 7.0, "norms": 1.0}),
            LayerTime(kind="head and loss", forward_ms=20.0, backward_ms=0.0, share=0.3),
        ],
        breakdown_of="with the bundle",
        points=[RooflinePoint(kind=kind, run="with the bundle", intensity=300.0, tflops=250.0, share=0.37)],
        roofline=Roofline(tflops=685.0, bandwidth=4.27, basis="measured"),
        not_measured=["There is no GPU here."],
        corpus="Python's standard library, byte level",
        seconds=31.0,
        summary="slice on NVIDIA H200: 1,250 tokens/s with the bundle",
    )  # fmt: skip


def scale_result() -> ScaleResult:
    """One way of training that fits, and one that does not."""
    hardware = Hardware(name="NVIDIA H200 SXM", nodes=16, per_node=8, memory_bytes=141 * 2**30, link=450.0, nic=50.0)
    budget = Budget(
        device={"weights": 2**33, "activations": 2**32},
        host={"checkpoint copy": 2**30},
        disk={"checkpoints": 2**40},
        device_available=129 * 2**30,
    )
    layout = Layout(
        ep=64, efsdp=2, experts_per_rank=4, hierarchical=True, device_bytes=12 * 2**30, fits=True, step_s=3.2,
        tokens_per_second_per_device=10240.0, all_to_all_share=0.21, chosen=True,
    )  # fmt: skip
    group = Group(
        name="ep_across", purpose=f"first hop {HOSTILE}", size=8, count=16, stride=8, first=[0, 8, 16, 24, 32, 40, 48],
        between_nodes=0.875,
    )  # fmt: skip
    point = ScalingPoint(
        devices=128, ep=64, step_s=3.2, tokens_per_second_per_device=10240.0, efficiency=0.87, all_to_all_share=0.21,
        fits=True,
    )  # fmt: skip
    projection = Projection(
        step_s=3.2,
        low_s=2.9,
        high_s=3.6,
        tokens_per_second_per_device=10240.0,
        tflops_per_device=210.0,
        mfu=0.21,
        all_to_all_share=0.21,
        parts=[Part(name="matrix products", seconds=2.0, share=0.6), Part(name="all-to-all", seconds=0.7, share=0.2)],
        curve=[point.model_copy(update={"devices": 8, "ep": 8, "efficiency": 1.0}), point],
        uneven=[UnevenPoint(imbalance=1.5, step_s=3.61)],
        basis=["a projection"],
    )
    plan = ModePlan(
        mode="adapters",
        words="rank-16 adapters",
        budget=budget,
        layouts=[layout],
        groups=[group],
        expert_split="rank r holds experts 4 (r mod 64) to 4 (r mod 64) + 3 of 256",
        projection=projection,
    )
    large = budget.model_copy(update={"device": {"weights": 2**40}})
    full = plan.model_copy(update={"mode": "full", "budget": large, "projection": None, "reason": "too large"})
    return ScaleResult(
        hardware=hardware,
        sequence_length=8192,
        microbatch=1,
        batch=512,
        modes=[plan, full],
        dry_ep=64,
        dry=[
            DryRank(rank=127, weight_bytes=2**30, gradient_bytes=2**20, optimizer_bytes=2**21, tokens=128, seconds=17.0,
                    host_bytes=2**29,
                    collectives=[CollectiveRow(kind="all-to-all", ranks=64, phase="forward", calls=104, bytes=2**28)])
        ],
        gloo=[
            GlooRun(ranks=n, ep=n, step_ms=200.0, tokens_per_second=1000.0, losses=[6.2, 6.1], difference=difference)
            for n, difference in ((1, 0.0), (2, 2e-8))
        ],
        not_measured=["Nothing ran on 128 devices."],
        seconds=50.0,
        summary="128 devices; adapters: EP 64 x 2",
    )  # fmt: skip
