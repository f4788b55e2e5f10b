"""Compares two GPUs with one: data parallelism, and heads sharded over the vocabulary.

    python -m profiling.two_gpus                       # starts two processes itself
    torchrun --nproc-per-node 2 -m profiling.two_gpus  # started by torchrun
    python -m profiling.two_gpus --cpu --tiny          # a smoke test: NumPy and sockets

Rank 0 first runs the single-GPU work, so both times are from the same GPU in the same state.
`checks` compares results, `training` times steps at the same batch per GPU, `heads` times the fused
head and reports its memory, `phases` times the phases of the sharded loss, `alone` times one shard
without communication, `links` times an all_reduce of gradient size and a small all_gather. `phases`
and `alone` need only one GPU: `--ranks 1`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from cukit.commands.compile import Variant, build
from cukit.core.device import current_device
from cukit.core.kernel import KernelSpec, Launch, load_kernel
from cukit.distill import (
    Distiller,
    Trainer,
    VocabularyShard,
    Windows,
    linear_cross_entropy,
    linear_distillation_loss,
    vocabulary_parallel_cross_entropy,
    vocabulary_parallel_distillation_loss,
)
from cukit.distill.losses._cross_entropy_rows import cross_entropy_specs
from cukit.distill.losses._divergence_rows import (
    DivergenceConfig,
    divergence_specs,
    plan_divergence,
)
from cukit.distill.losses._loss_options import (
    DIVERGENCES,
    LossOptions,
    RowOptions,
    RowShard,
    factors_of,
    pack_rows,
)
from cukit.distributed import Alone, Communicator, communicator
from cukit.gemm import matmul
from cukit.models import Transformer, TransformerConfig
from profiling.data import DTYPES, normal

PARTS = ("checks", "heads", "training", "phases", "alone", "links")
STUDENT = {"hidden_size": 768, "num_layers": 12, "num_heads": 12}
TEACHER = {"hidden_size": 1024, "num_layers": 16, "num_heads": 16}
TINY = {"hidden_size": 32, "num_layers": 1, "num_heads": 2}
HEAD = (4096, 2304, 2304, 256000)  # rows, hidden sizes, vocabulary
TINY_HEAD = (48, 16, 24, 1000)


class Bench:
    """The work of one rank."""

    def __init__(self, xp: Any, comm: Communicator, tiny: bool) -> None:
        self.xp, self.comm, self.tiny = xp, comm, tiny
        self.on_gpu = xp is not np
        self.dtype = "bfloat16" if self.on_gpu else "float32"

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.comm.rank == 0:
            print(text, flush=True)

    def wait(self) -> None:
        """Synchronise the current stream of the GPU."""
        if self.on_gpu:
            self.xp.cuda.get_current_stream().synchronize()

    def seconds(self, call: Callable[[], Any], repeats: int, together: bool) -> float:
        """Return the median time of `repeats` calls in seconds, after two untimed calls.

        together: synchronise the ranks before each call.
        """
        times = []
        for index in range(repeats + 2):
            self.wait()
            if together:
                self.comm.barrier()
            start = time.perf_counter()
            call()
            self.wait()
            if index > 1:
                times.append(time.perf_counter() - start)
        return statistics.median(times)

    # -- data parallelism ----------------------------------------------------------------------

    def trainer(
        self, comm: Communicator, batch: int, seq_len: int, dtype: str, small: bool, **options: Any
    ) -> Trainer:
        """Return a trainer that distils a teacher into a student."""

        def model(sizes: dict[str, int], seed: int) -> Transformer:
            heads, hidden = sizes["num_heads"], sizes["hidden_size"]
            config = TransformerConfig(
                512 if small else 32768, hidden, sizes["num_layers"], heads, heads, hidden // heads,
                hidden * 8 // 3 // 64 * 64 or 64, seq_len, tie_embeddings=False, dtype=dtype,
            )  # fmt: skip
            return Transformer.initialise(config, seed=seed, xp=self.xp)

        middle = {"hidden_size": 256, "num_layers": 3, "num_heads": 4}
        sizes = (TINY, TINY) if self.tiny else (middle, middle) if small else (STUDENT, TEACHER)
        objective = Distiller(model(sizes[0], 1), model(sizes[1], 2), alpha=0.9, temperature=2.0)
        text = np.random.default_rng(0).integers(0, 256, 1 << 20).astype(np.uint8)
        windows = Windows(text, batch=batch, seq_len=seq_len, seed=0, xp=self.xp, ranks=comm)
        return Trainer(objective, windows, lr=1e-3, communicator=comm, **options)

    def checks(self) -> None:
        """Compare all ranks with one process that has the whole batch, and sharded heads with
        unsharded ones."""
        size = self.comm.size
        bound = 5e-3 if self.on_gpu else 1e-4
        batch, seq_len = (2, 8) if self.tiny else (4, 128)
        both = self.trainer(self.comm, batch, seq_len, self.dtype, True, bucket_bytes=1 << 18)
        losses = [both.train_step().read() for _ in range(4)]
        alone = self.trainer(Alone(), batch * size, seq_len, self.dtype, True)
        expected = [alone.train_step().read() for _ in range(4)]
        worst = max(
            abs(a[name] - b[name]) / abs(b[name])
            for a, b in zip(losses, expected, strict=True)
            for name in b
        )
        self.verdict(f"data parallel {self.dtype}: losses, gradient norm of 4 steps", worst, bound)
        rng = np.random.default_rng(5)
        shape = (40, 32, 48, 1003) if self.tiny else (600, 512, 768, 32003)
        for dtype in ("float32", "bfloat16") if self.on_gpu else ("float32",):
            arrays = self.head(shape, dtype)
            targets = self.xp.asarray(rng.integers(0, shape[-1], shape[0]).astype(np.int32))
            for divergence in DIVERGENCES if dtype == self.dtype else ("forward_kl", "jsd"):
                options = {"divergence": divergence, "targets": targets, "hard_weight": 0.4}
                self.compare(divergence, arrays, dtype, **options)
            self.compare("softcap", arrays, dtype, softcap=20.0, temperature=2.0)
            hidden, weight, *_ = arrays
            shard = VocabularyShard(self.comm, shape[-1])
            got = vocabulary_parallel_cross_entropy(
                hidden, self.local_shard(shard, weight), targets, shard=shard
            )
            whole = linear_cross_entropy(hidden, weight, targets)
            self.compare_results("cross-entropy", dtype, shard, got, whole)

    def compare(self, name: str, arrays: Sequence[Any], dtype: str, **options: Any) -> None:
        """Compare the sharded distillation loss and its gradients with the unsharded ones."""
        hidden, weight, teacher, teacher_weight = arrays
        shard = VocabularyShard(self.comm, weight.shape[0])
        parts = self.local_shard(shard, weight), self.local_shard(shard, teacher_weight)
        got = vocabulary_parallel_distillation_loss(
            hidden, parts[0], teacher, parts[1], shard=shard, **options
        )
        whole = linear_distillation_loss(*arrays, **options)
        self.compare_results(name, dtype, shard, got, whole)

    def compare_results(
        self, name: str, dtype: str, shard: VocabularyShard, got: Any, whole: Any
    ) -> None:
        """Print the largest difference of loss and gradients, relative to each array's maximum."""
        worst = 0.0
        pairs = (
            (got.loss, whole.loss),
            (got.grad_hidden, whole.grad_hidden),
            (got.grad_weight, shard.part(whole.grad_weight)),
        )
        for ours, theirs in pairs:
            a, b = (self.host(each).astype(np.float64) for each in (ours, theirs))
            worst = max(worst, float(np.abs(a - b).max() / np.abs(b).max()))
        bound = 2e-4 if dtype == "float32" else 2e-2
        self.verdict(f"sharded head {dtype} {name}", worst, bound)

    def verdict(self, name: str, worst: float, bound: float) -> None:
        """Print whether the largest difference of all ranks is within the bound."""
        found = [float(each) for each in self.comm.exchange(repr(worst).encode())]
        word = "ok" if max(found) <= bound else "WRONG"
        self.say(f"{word:5} {name}: worst relative difference {max(found):.1e}, allowed {bound}")

    def local_shard(self, shard: VocabularyShard, whole: Any) -> Any:
        return shard.part(whole).copy()

    def host(self, array: Any) -> Any:
        return array.get() if hasattr(array, "get") else np.asarray(array)

    def training(self) -> None:
        """Time steps at the same batch per GPU, on one GPU and on two."""
        batch, seq_len = (2, 8) if self.tiny else (16, 1024)
        repeats = 3 if self.tiny else 10
        alone = 0.0
        if self.comm.rank == 0:
            trainer = self.trainer(Alone(), batch, seq_len, self.dtype, self.tiny)
            alone = self.steps(trainer, repeats, False)
            del trainer
            self.free()
        self.comm.barrier()
        tokens = batch * seq_len
        self.say(
            f"training, 1: {alone * 1e3:8.2f} ms a step {tokens / alone if alone else 0:11,.0f}/s"
        )
        for mib, overlap in ((32, True), (128, True), (32, False)):
            trainer = self.trainer(
                self.comm, batch, seq_len, self.dtype, self.tiny, bucket_bytes=mib << 20,
                overlap=overlap,
            )  # fmt: skip
            both = self.steps(trainer, repeats, True)
            size = trainer._gradients[0].flat.nbytes / 2**20
            self.say(
                f"training, {self.comm.size}: {both * 1e3:8.2f} ms a step "
                f"{self.comm.size * tokens / both:11,.0f}/s, "
                f"{self.comm.size * alone / both:.3f} times; "
                f"buckets {mib} MiB of {size:.0f}, overlap {overlap}"
            )
            del trainer
            self.free()

    def steps(self, trainer: Trainer, count: int, together: bool) -> float:
        """Return the mean time of steps without synchronisation between them."""
        for _ in range(3):
            trainer.train_step()
        self.wait()
        if together:
            self.comm.barrier()
        start = time.perf_counter()
        for _ in range(count):
            trainer.train_step()
        self.wait()
        return (time.perf_counter() - start) / count

    # -- heads ---------------------------------------------------------------------------------

    def head(self, shape: tuple[int, int, int, int], dtype: str, part: Any = None) -> list[Any]:
        """Return hidden, weight, teacher_hidden and teacher_weight; `part` shards the weights."""
        rows, hidden, teacher, vocab = shape

        def local(whole: Any) -> Any:
            return whole if part is None else self.local_shard(part, whole)

        return [
            self.numbers((rows, hidden), dtype, 1),
            local(self.numbers((vocab, hidden), dtype, 2, hidden**-0.5)),
            self.numbers((rows, teacher), dtype, 3),
            local(self.numbers((vocab, teacher), dtype, 4, teacher**-0.5)),
        ]

    def numbers(self, shape: tuple[int, int], dtype: str, seed: int, scale: float = 1.0) -> Any:
        """Return a random array, equal on every rank if small enough to be drawn on the host."""
        if shape[0] * shape[1] > 1 << 25:
            return normal(shape, dtype, scale)
        drawn = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)
        return self.xp.asarray(drawn.astype(DTYPES[dtype]))

    def phases(self) -> None:
        """Time phases 1 and 3 of a sharded forward KL on 1024 rows, half a chunk, for several
        splits of a row over thread blocks."""
        if self.comm.rank == 0 and self.on_gpu:
            rows, columns = 1024, HEAD[-1] // 2
            student, teacher, grad = (normal((rows, columns), self.dtype) for _ in range(3))
            states = self.xp.empty((1, rows, 12), np.float32)
            losses = self.xp.empty(rows, np.float32)
            packed = pack_rows(
                RowOptions(), columns, width=columns, row_stride=columns, teacher_stride=columns
            )
            shard = RowShard(0, columns, 0, 1).pack(rows)
            factors = factors_of(LossOptions(), 1.0 / rows)
            for config in phase_configs():
                grid = (rows * config.split.cluster,)
                launch = Launch(load_kernel(config.spec()), grid, (packed, shard))
                exchanged = (None, states) if config.phase == 1 else (states, None)
                into = grad if config.phase == 3 else None
                arrays = student, teacher, None, None, losses, None, into, None, None, *exchanged
                took = self.device_seconds(partial(launch, *arrays, trailing_args=(factors,)), 10)
                moved = (2 if config.phase == 1 else 3) * rows * columns * 2
                self.say(
                    f"phase {config.phase}, {config.split.cluster} blocks of "
                    f"{config.split.threads} a row: {took * 1e6:6.1f} us, "
                    f"{moved / took / 1e12:.2f} TB/s"
                )
            del student, teacher, grad
            self.products()
        self.comm.barrier()

    def products(self) -> None:
        """Time the matrix products of a chunk of a sharded head; grad_hidden in both dtypes."""
        rows, hidden, columns = 2048, HEAD[1], HEAD[-1] // 2
        states, weight = (normal((each, hidden), self.dtype) for each in (rows, columns))
        logits = normal((rows, columns), self.dtype)
        options: dict[str, Any] = {"precision": "auto"}
        share, whole = (self.xp.empty((rows, hidden), each) for each in (np.float32, logits.dtype))
        gradient = self.xp.empty((columns, hidden), logits.dtype)
        calls = {
            "logits": partial(matmul, states, weight, transpose_b=True, out=logits, **options),
            "grad_hidden float32": partial(matmul, logits, weight, out=share, **options),
            "grad_hidden bfloat16": partial(matmul, logits, weight, out=whole, **options),
            "grad_weight": partial(
                matmul, logits, states, transpose_a=True, out=gradient, **options
            ),
        }
        for name, call in calls.items():
            took = self.device_seconds(call, 6)
            rate = 2 * rows * hidden * columns / took / 1e12
            self.say(f"product {name}: {took * 1e3:.3f} ms, {rate:.0f} TFLOP/s")

    def device_seconds(self, call: Callable[[], Any], count: int) -> float:
        """Return the GPU time of a call, averaged over `count` calls after an untimed one."""
        first, last = (self.xp.cuda.Event() for _ in range(2))
        call()
        first.record()
        for _ in range(count):
            call()
        last.record()
        last.synchronize()
        return float(self.xp.cuda.get_elapsed_time(first, last)) / count / 1e3

    def alone(self) -> None:
        """Time one shard of a head without communication, and the unsharded head."""
        shape = TINY_HEAD if self.tiny else HEAD
        if self.comm.rank == 0 and self.on_gpu:
            shard = VocabularyShard(_WithoutPeers(), shape[-1])
            arrays = self.head(shape, self.dtype, shard)
            for divergence in ("forward_kl", "jsd"):
                call = partial(
                    vocabulary_parallel_distillation_loss, *arrays, shard=shard,
                    divergence=divergence,
                )  # fmt: skip
                needed = self.memory(call)
                took = self.seconds(call, 10, False)
                self.say(
                    f"head, one shard, {divergence}: {took * 1e3:7.2f} ms, "
                    f"{needed / 2**20:7.0f} MiB"
                )
            del arrays, call
            self.free()
            whole = self.head(shape, self.dtype)
            call = partial(linear_distillation_loss, *whole)
            needed = self.memory(call)
            took = self.seconds(call, 10, False)
            self.say(f"head, unsharded: {took * 1e3:7.2f} ms, {needed / 2**20:7.0f} MiB")
            del whole, call
            self.free()
        self.comm.barrier()

    def heads(self) -> None:
        """Measure time and memory of the fused head, unsharded and sharded."""
        shape = TINY_HEAD if self.tiny else HEAD
        repeats = 3 if self.tiny else 12
        alone, memory = 0.0, 0
        if self.comm.rank == 0:
            arrays = self.head(shape, self.dtype)
            memory = self.memory(lambda: linear_distillation_loss(*arrays))
            alone = self.seconds(lambda: linear_distillation_loss(*arrays), repeats, False)
            del arrays
            self.free()
        self.comm.barrier()
        self.say(f"head {shape}, 1: {alone * 1e3:7.2f} ms, {memory / 2**20:7.0f} MiB")
        shard = VocabularyShard(self.comm, shape[-1])
        arrays = self.head(shape, self.dtype, shard)
        self.free()
        for divergence in ("forward_kl", "jsd") if not self.tiny else ("forward_kl",):

            def call(divergence: str = divergence) -> Any:
                return vocabulary_parallel_distillation_loss(
                    *arrays, shard=shard, divergence=divergence
                )

            needed = self.memory(call)
            both = self.seconds(call, repeats, True)
            self.say(
                f"head, {self.comm.size}, {divergence}: {both * 1e3:7.2f} ms, "
                f"{needed / 2**20:7.0f} MiB; {both / alone if alone else 0:.3f} of the time, "
                f"{needed / memory if memory else 0:.3f} of the memory"
            )

    def memory(self, call: Callable[[], Any]) -> int:
        """Return the peak memory of results and workspace during a call, in bytes; 0 on the CPU."""
        if not self.on_gpu:
            call()
            return 0
        self.free()
        pool = self.xp.get_default_memory_pool()
        before, peak = pool.used_bytes(), 0

        class Watch(self.xp.cuda.MemoryHook):  # type: ignore[misc,name-defined]
            name = "peak of a call"

            def malloc_postprocess(self, **_: Any) -> None:
                nonlocal peak
                peak = max(peak, pool.used_bytes())

        with Watch():
            result = call()
        self.wait()
        del result
        return int(peak - before)

    def free(self) -> None:
        if self.on_gpu:
            self.wait()
            self.xp.get_default_memory_pool().free_all_blocks()

    def links(self) -> None:
        """Time all_reduce of a gradient bucket, and all_gather of a sharded loss's row states."""
        for mib in (1, 32, 256) if not self.tiny else (1,):
            array = self.xp.zeros(mib << 18, np.float32)
            took = self.seconds(partial(self.comm.all_reduce, array), 8, True)
            self.say(
                f"all_reduce of {mib:4} MiB: {took * 1e6:8.0f} us, {mib / 1024 / took:7.1f} GiB/s"
            )
        state = self.xp.zeros((1024, 12), np.float32)
        took = self.seconds(lambda: self.comm.all_gather(state), 20, True)
        self.say(f"all_gather of 48 KiB: {took * 1e6:8.0f} us with its call and a wait")


class _WithoutPeers(Alone):
    """Rank 0 of two ranks, without a second process."""

    size = 2

    def all_gather(self, array: Any, out: Any = None) -> Any:
        out[0], out[1] = array, array
        return out


def phase_configs() -> list[DivergenceConfig]:
    """Configurations of phases 1 and 3 with different splits of a row."""
    return [
        plan_divergence(
            HEAD[-1] // 2, "bfloat16", 2, "int32", 8, "forward_kl", phase == 3, False, False,
            current_device(), phase, cluster=cluster, threads=threads,
        )
        for phase in (1, 3)
        for cluster, threads in ((1, 256), (1, 512), (2, 256), (2, 512), (4, 256), (8, 256))
    ]  # fmt: skip


def compile_ahead(parts: Sequence[str]) -> None:
    """Compile the loss kernels on all CPU cores, before the ranks start."""
    device = current_device()
    specs: list[KernelSpec] = []
    checked = (("bfloat16", DIVERGENCES), ("float32", ("forward_kl", "jsd")))
    for name, kinds in checked if "checks" in parts else ():
        halves: tuple[tuple[int, tuple[int, ...]], ...] = ((32003, (0,)), (16008, (1, 2, 3)))
        for columns, phases in halves:
            rows = [(np.dtype(DTYPES[name]), columns)]
            for phase in phases:
                grad = phase in (0, 3)
                for divergence in kinds:
                    specs += divergence_specs(
                        device, divergence, ((grad, True, False),), rows, phase
                    )
                specs += divergence_specs(device, "forward_kl", ((grad, False, True),), rows, phase)
                specs += cross_entropy_specs(device, ((grad, False),), rows, phase)
    heads: tuple[tuple[int, str, bool, tuple[int, ...]], ...] = (
        (HEAD[-1], "forward_kl", False, (0,)),
        (HEAD[-1] // 2, "forward_kl", False, (1, 3)),
        (HEAD[-1] // 2, "jsd", False, (1, 2, 3)),
        (32768, "forward_kl", True, (0,)),
        (512, "forward_kl", True, (0,)),
    )
    for columns, divergence, hard, phases in heads:
        rows = [(np.dtype(DTYPES["bfloat16"]), columns)]
        for phase in phases:
            kind = (phase in (0, 3), hard, False)
            specs += divergence_specs(device, divergence, (kind,), rows, phase)
    if "phases" in parts:
        specs += [config.spec() for config in phase_configs()]
    wanted = [Variant(spec, device) for spec in dict.fromkeys(specs)]
    _, errors = build(wanted, quiet=True)
    print(f"compiled {len(wanted)} kernels, {len(errors)} errors", flush=True)


def start(count: int) -> int:
    """Start this module once per rank, as torchrun does; return the exit status of the first rank
    that fails, 0 if none does."""
    env = dict(os.environ, WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1")
    command = [sys.executable, "-m", "profiling.two_gpus", *sys.argv[1:]]
    ranks = [
        subprocess.Popen(command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]
    return wait(ranks)


def wait(ranks: Sequence[subprocess.Popen[bytes]], grace_seconds: float = 1.0) -> int:
    """Wait for the ranks. If one fails, terminate the others, which would block in a collective.
    Return the exit status of the failed rank (the number of the signal that ended it), else 0."""
    try:
        while None in (statuses := [rank.poll() for rank in ranks]) and not any(statuses):
            time.sleep(0.05)
        failed = next((abs(status) for status in statuses if status), 0)
        if failed:
            time.sleep(grace_seconds)  # for the messages of other ranks that fail
            for rank in ranks:
                rank.terminate()
            for rank in ranks:
                rank.wait()
        return failed
    finally:
        for rank in ranks:
            rank.kill()


def main() -> int:
    """Run the selected parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(PARTS)}; default: all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if "WORLD_SIZE" not in os.environ and "OMPI_COMM_WORLD_SIZE" not in os.environ:
        if not options.cpu:
            # In a separate process: ranks must not inherit a GPU context.
            names = tuple(options.parts or PARTS)
            code = f"import profiling.two_gpus as t; t.compile_ahead({names!r})"
            subprocess.run([sys.executable, "-c", code], check=True)
        return start(options.ranks)
    xp = np if options.cpu else importlib.import_module("cupy")
    comm = communicator(xp, timeout_seconds=120)
    bench = Bench(xp, comm, options.tiny)
    bench.say(f"{comm.size} ranks, {type(comm).__name__}")
    for part in options.parts or PARTS:
        begun = time.perf_counter()
        getattr(bench, part)()
        bench.say(f"-- {part}: {time.perf_counter() - begun:.1f} s")
    comm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
