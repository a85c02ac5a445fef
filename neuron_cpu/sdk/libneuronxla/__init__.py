"""The compiler as public libraries call it: it takes a graph and makes the file that runs.

Sources of names and arguments: NxD, trace/model_builder.py (v2.26.0, fecfe75); Transformers
NeuronX, compiler.py (1ade6d7).
"""

import json
from pathlib import Path
from typing import Any

from torch_neuronx.pyhlo import hlo_pb2
from torch_neuronx.xla_impl.trace import compiled_graph

RECORD_FILE = "operators.json"  # what the graph runs, beside graph.hlo


def neuron_xla_compile(
    module_bytes: bytes,
    compiler_flags: Any = None,
    *_: Any,
    work_dir: str | Path | None = None,
    **_options: Any,
) -> bytes:
    """Compile an HloModuleProto. The record of one that `generate_hlo` made goes into `work_dir`;
    one that PyHLO wrote, with all its operators, is checked by XLA."""
    module = hlo_pb2.HloModuleProto()
    module.ParseFromString(module_bytes)
    if module.HasField("host_program_shape"):
        from neuron_cpu.hlo.execute import to_neff

        return to_neff(module_bytes)
    graph = compiled_graph(module.name)
    if work_dir is not None:
        Path(work_dir).mkdir(parents=True, exist_ok=True)
        record = graph.record.as_json() | {"submodel": Path(work_dir).parent.name}
        text = json.dumps({"graphs": [record]}, indent=1) + "\n"
        (Path(work_dir) / RECORD_FILE).write_text(text, encoding="utf-8")
    return graph.tape.to_bytes()


def neuron_xla_wlo_compile(
    module_bytes: bytes, *arguments: Any, **options: Any
) -> tuple[bytes, None]:
    """The same, without a proposal for the weights' layout: none is better here."""
    return neuron_xla_compile(module_bytes, *arguments, **options), None
