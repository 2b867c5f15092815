"""`python -m validation.ordering.observe OUT`: what every kernel parameter of the specialised step really points to, on a GPU.

Runs nano-K3 launch by launch, for one rank and for two virtual ranks, several steps each, with a digest of every buffer before and after
each launch; writes OUT/trace.json for `fasttrack audit --observed` (see `observed`). Then captures the same step into a CUDA graph and
writes what the driver would launch, with its edges, to OUT/graph.json. Needs a Hopper or Blackwell GPU; seconds, after compiling.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from validation.ordering.observed import HostWrite, Seen, SeenLaunch, Trace, trace_json
from validation.ordering.own_kernels import kernel_sources

STEPS = 4
SEED = 23
CASES = ((1, 3, 1), (1, 2, 4), (2, 2, 1))  # ranks, requests, tokens a request
POINTER_BYTES = 8


@dataclass(frozen=True)
class Range:
    """Memory that one kernel parameter points to. `tensor` is any view of it that starts there."""

    index: int
    name: str
    tensor: torch.Tensor

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def bytes(self) -> int:
        """From the first element to the last, gaps included."""
        last = sum((size - 1) * stride for size, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        return (last + 1) * self.tensor.element_size() if self.tensor.numel() else 0

    def digest(self) -> torch.Tensor:
        """Two sums over the bytes, one weighted by position, without leaving the device."""
        start = self.tensor.storage_offset() * self.tensor.element_size()
        raw = torch.empty(0, dtype=torch.uint8, device=self.tensor.device)
        raw = raw.set_(self.tensor.untyped_storage(), start, (self.bytes,), (1,))
        values = raw.to(torch.int64)
        places = torch.arange(1, values.numel() + 1, device=values.device) * 2654435761 % 1000003
        return torch.stack((values.sum(), (values * places).sum()))


@dataclass
class Recorder:
    """Collects launches and what changed. `graph` names the program, so that buffers of different programs are not compared."""

    graph: str
    launches: list[SeenLaunch] = field(default_factory=list)
    host_writes: list[HostWrite] = field(default_factory=list)
    step: int = -1
    order: int = 0
    _known: dict[tuple[int, int], tuple[Range, torch.Tensor]] = field(default_factory=dict)

    def start_step(self) -> None:
        """Call when the host has prepared the step and before its first launch: what changed since the last launch, the host wrote."""
        self.step, self.order = self.step + 1, 0
        for (address, size), (where, before) in list(self._known.items()):
            now = where.digest()
            if not torch.equal(now, before):
                self.host_writes.append(HostWrite(step=self.step, address=address, bytes=size, graph=self.graph))
            self._known[address, size] = (where, now)

    def around(self, launches: Sequence[tuple[int, str, Sequence[Range]]], run: Any) -> None:
        """`run()` performs these launches, (rank, kernel, ranges) each, side by side, and returns when they are done."""
        before = [[where.digest() for where in ranges] for _, _, ranges in launches]
        run()
        for (rank, kernel, ranges), old in zip(launches, before, strict=True):
            seen = []
            for where, digest in zip(ranges, old, strict=True):
                now = where.digest()
                changed = not torch.equal(now, digest)
                self._known[where.address, where.bytes] = (where, now)
                seen.append(Seen(index=where.index, name=where.name, address=where.address, bytes=where.bytes, changed=changed))
            self.launches.append(
                SeenLaunch(step=self.step, order=self.order, rank=rank, graph=self.graph, kernel=kernel, params=tuple(seen))
            )
        self.order += 1


def ranges_of(spec: Any, tensors: Any, others: Any, boxes: Any) -> list[Range]:
    """The memory behind each pointer of the kernel itself. A mailbox has one range a destination rank; absent operands have none."""
    from kimi_k3_decode.device.launcher import Kind

    found, index = [], 0
    for param in spec.device_params:
        if param.kind in (Kind.OPERAND, Kind.HEALTH):
            found.append(Range(index, param.name, tensors[param.name]))
        elif param.kind is Kind.OTHER:
            found.append(Range(index, f"{param.name} (re-armed)", others[param.name]))
        elif param.kind is Kind.BOXES:
            found += [Range(index + n, param.name, box) for n, box in enumerate(boxes[param.name])]
        index += param.count
    return [where for where in found if where.tensor.numel()]


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat view from the start of the first buffer to the end of the last; they lie in one allocation."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return first
    elements = (last.data_ptr() - first.data_ptr()) // first.element_size() + last.numel()
    return first.as_strided((elements,), (1,), first.storage_offset())


def recording_path(weights: Any, tp: int, **options: Any) -> Any:
    """A GPU path that launches one kernel of every rank at a time and lets `recorder` look at memory in between."""
    from kimi_k3_decode import gpu_step
    from kimi_k3_decode.device.launcher import Kind

    class RecordingPath(gpu_step.GpuPath):
        recorder: Recorder | None = None

        def __init__(self, *given: Any, **options: Any) -> None:
            self.ranges: dict[int, list[Range]] = {}  # by the identity of a launcher, which lives as long as its program
            super().__init__(*given, **options)

        def _launcher(self, rank: Any, launch: Any, rows: int, shared: Any, *, pdl: bool) -> Any:
            made = super()._launcher(rank, launch, rows, shared, pdl=pdl)
            tensors, others = {gpu_step.HEALTH: rank.health}, {}
            for operand in launch.contract.operands:
                name = launch.bindings[operand.name][0]
                role = operand.role.value
                if role == "weight":
                    tensors[operand.name] = rank.weights[name]
                elif role == "mailbox" and operand.access.value == "read_write":
                    tensors[operand.name] = rank.boxes[f"{rows}.{name}"]
                    others[operand.name] = rank.boxes[f"{rows}.{gpu_step.other_parity(name)}"]
                elif role in ("state", "table"):
                    tensors[operand.name] = shared[name]
                elif role not in ("scratch", "mailbox"):
                    tensors[operand.name] = _joined([rank.buffers[f"{rows}.{one}"] for one in launch.bindings[operand.name]])
            boxes = {
                p.name: [peer.boxes[f"{rows}.{launch.bindings[p.name][0]}"] for peer in self._ranks]
                for p in made.spec.params
                if p.kind is Kind.BOXES
            }
            self.ranges[id(made)] = ranges_of(made.spec, tensors, others, boxes)
            return made

        def _launch_ranks(self, program: Any, ranks: Any, current: Any) -> None:
            recorder = self.recorder
            if recorder is None:
                super()._launch_ranks(program, ranks, current)
                return
            recorder.start_step()
            for together in zip(*(program.launches[rank.number] for rank in ranks), strict=True):
                pairs = list(zip(ranks, together, strict=True))
                seen = [(rank.number, launcher.spec.id, self.ranges[id(launcher)]) for rank, (_, launcher) in pairs]

                def run(pairs: Any = pairs) -> None:
                    torch.cuda.synchronize()
                    for rank, (_, launcher) in pairs:
                        launcher.run(gpu_step._handle(rank.main))
                    torch.cuda.synchronize()

                recorder.around(seen, run)

    return RecordingPath(weights, tp, pdl=False, graphs=False, probes=False, **options)


def record(tp: int, requests: int, q: int, **options: Any) -> Recorder:
    """STEPS steps of nano-K3 with `tp` virtual ranks, each with caches of its own. `options` go to the path."""
    from kimi_k3_decode.config import NANO
    from kimi_k3_decode.random_init import draw_weights

    path = recording_path(draw_weights(NANO, SEED).to(torch.bfloat16), tp, **options)
    caches = [moved(started(requests, q), path.device) for _ in range(tp)]
    random = torch.Generator().manual_seed(SEED)
    recorder = Recorder(f"nano-tp{tp}-b{requests}-q{q}")
    path.recorder = recorder
    for step in range(STEPS):
        batch = caches[0].batch(torch.randint(3, NANO.vocab_size, (requests, q), generator=random))
        path.step(batch, caches if tp > 1 else caches[0])
        for one in caches:
            one.advance(range(requests), [1 + (step + r) % q for r in range(requests)])
    return recorder


def started(requests: int, q: int) -> Any:
    """Caches of requests of different lengths, with random contents."""
    from kimi_k3_decode.cache import Caches, KdaLayerCache
    from kimi_k3_decode.config import NANO

    caches = Caches.allocate(NANO, requests, 160, q_max=q, dtype=torch.bfloat16)
    random = torch.Generator().manual_seed(SEED)
    for request in range(requests):
        caches.reserve(request, 5 + 31 * request)
        caches.lengths_R[request] = 5 + 31 * request
    for cache in caches.layers:
        parts = (cache.conv_SWC, cache.state_SHVK) if isinstance(cache, KdaLayerCache) else (cache.pages_PTC,)
        for part in parts:
            part.copy_(torch.randn(part.shape, generator=random) * 0.2)
    return caches


def moved(caches: Any, device: torch.device) -> Any:
    """A copy of the caches on a device."""
    from kimi_k3_decode.cache import KdaLayerCache, MlaLayerCache

    layers: list[Any] = []
    for cache in caches.layers:
        if isinstance(cache, KdaLayerCache):
            layers.append(KdaLayerCache(cache.conv_SWC.to(device, copy=True), cache.state_SHVK.to(device, copy=True)))
        else:
            layers.append(MlaLayerCache(cache.pages_PTC.to(device, copy=True), cache.scale))
    return replace(caches.fork(), layers=layers)


# ---- what the driver would launch ----
def captured_graph(tp: int = 1, requests: int = 3, q: int = 1) -> dict[str, Any]:
    """Kernel nodes of a captured step with their pointers, and the edges between all nodes with their type."""
    from kimi_k3_decode.config import NANO
    from kimi_k3_decode.gpu_step import GpuPath
    from kimi_k3_decode.random_init import draw_weights

    path = GpuPath(draw_weights(NANO, SEED).to(torch.bfloat16), tp, graphs=False, probes=False)
    caches = moved(started(requests, q), path.device)
    batch = caches.batch(torch.full((requests, q), 7))
    path.step(batch, caches)  # loads every kernel: none may be loaded while capturing
    torch.cuda.synchronize()
    program = next(iter(path._programs.values()))
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        path._launch_all(program, path.device)
    return read_graph_nodes(graph.raw_cuda_graph())


def read_graph_nodes(handle: int) -> dict[str, Any]:
    """{"nodes", "edges"} of a `cudaGraph_t`. Raises RuntimeError with the driver's code."""
    from cuda.bindings import driver

    raw = driver.CUgraph(handle)
    nodes = _asked(driver.cuGraphGetNodes, raw)[0]
    numbers = {int(node): number for number, node in enumerate(nodes)}
    rows = [_node(driver, node, number) for number, node in enumerate(nodes)]
    edge_function = getattr(driver, "cuGraphGetEdges_v2", driver.cuGraphGetEdges)
    sources, targets, *data = _asked(edge_function, raw)
    kinds = [int(one.type) for one in data[0]] if data and not isinstance(data[0], int) else [0] * len(sources)
    edges = [
        {"from": numbers[int(a)], "to": numbers[int(b)], "type": "programmatic" if kind == 1 else "full"}
        for a, b, kind in zip(sources, targets, kinds, strict=True)
    ]
    return {"nodes": rows, "edges": edges}


def _asked(function: Any, raw: Any) -> list[Any]:
    """Results of a driver query that is asked for the count first."""
    count = _checked(function(raw, 0))[-1]
    return _checked(function(raw, count))


def _checked(answer: Any) -> list[Any]:
    code, *rest = answer
    if int(code):
        raise RuntimeError(f"driver: got {code}, needs success")
    return rest


def _node(driver: Any, node: Any, number: int) -> dict[str, Any]:
    kind = _checked(driver.cuGraphNodeGetType(node))[0]
    if "KERNEL" not in str(kind):
        return {"id": number, "type": str(kind).rpartition("_")[2].lower()}
    params = _checked(driver.cuGraphKernelNodeGetParams(node))[0]
    kernel = int(params.kern) if params.kern is not None else 0
    name = _checked(driver.cuKernelGetName(params.kern) if kernel else driver.cuFuncGetName(params.func))[0]
    grid = [params.gridDimX, params.gridDimY, params.gridDimZ]
    text = name.decode() if isinstance(name, bytes) else str(name)
    return {"id": number, "type": "kernel", "kernel": text, "grid": grid, "params": list(_pointers(driver, params, kernel))}


def _pointers(driver: Any, params: Any, kernel: int) -> Iterator[dict[str, int]]:
    """Parameters of eight bytes: they may be pointers."""
    table = ctypes.cast(int(params.kernelParams), ctypes.POINTER(ctypes.c_void_p))
    for index in range(512):
        answer = driver.cuKernelGetParamInfo(params.kern, index) if kernel else driver.cuFuncGetParamInfo(params.func, index)
        if int(answer[0]):
            return
        if answer[2] == POINTER_BYTES:
            yield {"index": index, "address": ctypes.cast(table[index], ctypes.POINTER(ctypes.c_uint64))[0]}


def write_json(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        json.dump(document, file)
        file.write("\n")
    os.replace(file.name, path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m validation.ordering.observe", description=__doc__)
    parser.add_argument("out", type=Path, help="folder for trace.json and graph.json")
    out: Path = parser.parse_args(arguments).out
    if not torch.cuda.is_available():
        print("observe: got no CUDA device, needs a Hopper or Blackwell GPU", file=sys.stderr)
        return 3
    started_at = time.perf_counter()
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    launches: list[SeenLaunch] = []
    writes: list[HostWrite] = []
    for case in CASES:
        recorder = record(*case)
        launches += recorder.launches
        writes += recorder.host_writes
        print(f"{recorder.graph}: {len(recorder.launches)} launches, {time.perf_counter() - started_at:.1f} s", flush=True)
        device = f"{name} (sm_{capability[0]}{capability[1]})"
        trace = Trace(launches=tuple(launches), host_writes=tuple(writes), device=device, steps=STEPS, sources=kernel_sources())
        write_json(out / "trace.json", trace_json(trace))  # after each case, so that a later failure loses nothing
    try:
        about = {"device": name, "sources": kernel_sources(), "case": {"config": "nano", "tp": 1, "requests": 3, "q": 1}}
        write_json(out / "graph.json", {**about, **captured_graph()})
    except Exception as error:  # the trace stands without it
        write_json(out / "graph.json", {"device": name, "error": f"{type(error).__name__}: {error}"})
    print(json.dumps({"launches": len(launches), "seconds": round(time.perf_counter() - started_at, 1), "out": str(out)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
