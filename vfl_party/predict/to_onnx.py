"""Exports a trained party's models as ONNX files, for programs without torch.

The encoder takes the party's columns in the units of its table. The graph fills missing values, and
scales and encodes the columns. A JSON file describes the inputs and outputs; the ONNX file's
metadata has the same description. The active party's top model is a separate file that takes the
embedding of each party. Its student is another file, which takes only the active party's columns.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from vfl_common.config.models import Combine, GbdtTop
from vfl_common.errors import Code, InputError
from vfl_common.files import private_file
from vfl_party.data import Preprocessor
from vfl_party.data.inputs.features import HIDDEN, MISSING, RESERVED, UNKNOWN
from vfl_party.models import combine, deterministic, width_of
from vfl_party.phases.scoring import SOLO
from vfl_party.predict.trained import TrainedParty

if TYPE_CHECKING:
    from collections.abc import Iterator

    from onnx import ModelProto

SUFFIX = ".onnx"
# The opset of the default domain. ONNX Runtime supports it since version 1.14.
OPSET = 18
# The domain and opset of the operator LabelEncoder, which maps categories to codes.
_ML, _ML_OPSET = "ai.onnx.ml", 3
NUMBERS, CATEGORIES, IMAGES = "numbers", "categories", "images"
OUTPUT = "output"
_ROWS = "rows"
# The number of rows for comparing the exported file with the module.
_N_EXAMPLES = 5
# The maximum difference between an output and torch's output, relative to the largest number in
# torch's output if this is above 1.
TOLERANCE = 1e-5


def embedding_of(party: str) -> str:
    """Returns the name of a party's embedding in the ONNX files."""
    return f"embedding of {party}"


class OnnxPreparation(nn.Module):
    """Prepares raw rows as ``Preprocessor.transform`` does, and computes their embeddings.

    The inputs are the ones that the party has: float32 numbers [B, F] with NaN for missing values
    or float32 images [B, C, H, W] in 0..1, and int64 codes of categories [B, K].
    """

    def __init__(self, encoder: nn.Module, preprocessor: Preprocessor) -> None:
        super().__init__()
        self.encoder = encoder
        self._one_hot, self._flatten = preprocessor.one_hot, preprocessor.flatten
        self._widths = [len(words) for words in preprocessor.vocabularies]
        self._has_values = preprocessor.image_shape is not None or bool(preprocessor.numeric_names)
        shape = (-1, *(1 for _ in (preprocessor.image_shape or ())[1:]))
        self.shift, self.scale = (
            nn.Buffer(torch.tensor(values, dtype=torch.float64).reshape(shape), persistent=False)
            for values in (preprocessor.shift, preprocessor.scale)
        )
        fill = (
            None
            if preprocessor.fill is None
            else torch.tensor(preprocessor.fill, dtype=torch.float32)
        )
        if fill is not None and preprocessor.image_shape is not None:
            fill = fill.reshape(preprocessor.image_shape)
        self.fill = nn.Buffer(fill, persistent=False) if fill is not None else None

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns the embeddings of raw rows."""
        remaining_inputs = list(inputs)
        columns = [self._scale(remaining_inputs.pop(0))] if self._has_values else []
        codes_BK = remaining_inputs.pop(0) if self._widths else None
        if codes_BK is not None and self._one_hot:
            columns += [
                self._encode_one_hot(codes_BK[:, k], width) for k, width in enumerate(self._widths)
            ]
            codes_BK = None
        if not columns and codes_BK is not None:
            columns = [codes_BK[:, :0].float()]
        x = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
        out: Tensor = self.encoder(x) if codes_BK is None else self.encoder(x, codes_BK)
        return out

    def _scale(self, values: Tensor) -> Tensor:
        if self.fill is not None:
            values = torch.where(torch.isnan(values), self.fill, values)
        x = ((values.double() - self.shift) / self.scale).float()
        return x.flatten(1) if self._flatten else x

    @staticmethod
    def _encode_one_hot(codes_B: Tensor, words: int) -> Tensor:
        """Returns a 0/1 column for "missing" and for each category. "Unknown" is all zeros."""
        place_B1 = (codes_B - HIDDEN).clamp(min=0).unsqueeze(1)
        is_known_B1 = (codes_B != UNKNOWN).unsqueeze(1)
        return ((place_B1 == torch.arange(1 + words)) & is_known_B1).float()


class Joint(nn.Module):
    """The top model after the combination of the parties' embeddings."""

    def __init__(self, top: nn.Module, rule: Combine) -> None:
        super().__init__()
        self.top, self._rule = top, rule

    def forward(self, *embeddings: Tensor) -> Tensor:
        """Returns the outputs for the embeddings of the parties, [B, D] each."""
        out: Tensor = self.top(combine(self._rule, embeddings))
        return out


@dataclass(frozen=True)
class Graph:
    """An ONNX file to write, and its description ``about``."""

    model: ModelProto
    about: dict[str, Any]


def export(trained: TrainedParty, path: Path) -> list[Path]:
    """Exports a party's models as ONNX files, and returns the paths of all files.

    ``path`` is the encoder's file. The active party also writes ``<name>-top.onnx`` and, if it has
    a student, ``<name>-student.onnx``. ``<name>.json`` describes the files. Only the owner may read
    them.

    Raises InputError if there is nothing to export, if a model cannot be exported, if the exported
    model has other results than the module, if packages are missing, or if a file exists.
    """
    graphs = _make_graphs(trained, path)
    description = path.with_suffix(".json")
    for file_path in (*graphs, description):
        if file_path.exists():
            raise InputError(
                Code.FILE_INVALID,
                f"{file_path}: exists already. Move it away or give another name.",
            )
    for target, graph in graphs.items():
        with private_file(target) as file:
            file.write(graph.model.SerializeToString())
    descriptions = {file_path.name: graph.about for file_path, graph in graphs.items()}
    with private_file(description) as file:
        file.write(f"{json.dumps(descriptions, indent=1)}\n".encode())
    return [*graphs, description]


def _make_graphs(trained: TrainedParty, path: Path) -> dict[Path, Graph]:
    if path.suffix != SUFFIX:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: the name of an ONNX file must end in {SUFFIX}. Give such a name.",
        )
    about, models = trained.about, trained.models
    if not {"encoder", "top"} & set(models):
        kinds = ", ".join(phase.kind for phase in about.recipe.phases)
        raise InputError(
            Code.MODEL_INVALID,
            f"a run of {kinds} trains neither an encoder nor a top model, so there is nothing to "
            "export. Give a run of another method.",
        )
    if about.recipe.model.precision != "float32":
        raise InputError(
            Code.MODEL_INVALID,
            f"the models of {about.party} were trained in {about.recipe.model.precision}, which "
            "the ONNX export does not support. Export them as safetensors.",
        )
    if trained.preprocessor is not None and trained.preprocessor.quantiles is not None:
        raise InputError(
            Code.MODEL_INVALID,
            f"the columns of {about.party} have data.scale = 'quantile', which the ONNX export "
            "does not support. Export the models as safetensors.",
        )
    graphs: dict[Path, Graph] = {}
    if "encoder" in models and trained.preprocessor is not None:
        graphs[path] = _make_encoder_graph(trained, trained.preprocessor)
    # If the network is cut in two, its upper half is the model "tail", which is not exported.
    if "top" in models and "tail" not in models:
        graphs[path.with_name(f"{path.stem}-top{SUFFIX}")] = _make_top_graph(trained)
    if SOLO in models and trained.preprocessor is not None:
        graphs[path.with_name(f"{path.stem}-student{SUFFIX}")] = _make_student_graph(
            trained, trained.preprocessor
        )
    return graphs


def _make_encoder_graph(trained: TrainedParty, preprocessor: Preprocessor) -> Graph:
    party, kind = trained.about.party, trained.about.encoder.kind
    what = f"the encoder of {party} (kind {kind!r})"
    # The top model has an input of the same name. No value inside a graph has a blank in its name.
    output = embedding_of(party)
    encoder = trained.models["encoder"]
    return _make_column_graph(
        trained, preprocessor, encoder, output, what, {"what": "encoder", "encoder": kind}
    )


def _make_student_graph(trained: TrainedParty, preprocessor: Preprocessor) -> Graph:
    what = f"the student of {trained.about.party}"
    about = {"what": "student"} | _describe_output(trained)
    return _make_column_graph(trained, preprocessor, trained.models[SOLO], OUTPUT, what, about)


def _make_column_graph(
    trained: TrainedParty,
    preprocessor: Preprocessor,
    encoder: nn.Module,
    output: str,
    what: str,
    description: Mapping[str, Any],
) -> Graph:
    """Exports a module that takes the party's columns.

    ``what`` names the module in messages, and ``description`` has more entries of its description.
    """
    inputs, examples = _describe_columns(preprocessor)
    module = OnnxPreparation(deterministic(encoder.eval()), preprocessor).eval()
    model = _export_module(module, inputs, examples, output, what)
    if preprocessor.vocabularies:
        _add_category_tables(model, preprocessor.vocabularies)
    about = _about(trained, inputs) | dict(description)
    return Graph(_add_description(model, about, output), about)


def _describe_columns(preprocessor: Preprocessor) -> tuple[dict[str, dict[str, Any]], list[Tensor]]:
    """Returns a description of the inputs for a party's columns, and example inputs."""
    inputs: dict[str, dict[str, Any]] = {}
    examples: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    if preprocessor.image_shape is not None:
        inputs[IMAGES] = {
            "type": "float32",
            "shape": [_ROWS, *preprocessor.image_shape],
            "values": "pixels in 0..1 (bytes divided by 255), or numbers in the scale of training",
        }
        examples.append(torch.rand(_N_EXAMPLES, *preprocessor.image_shape, generator=generator))
    elif preprocessor.numeric_names:
        inputs[NUMBERS] = {
            "type": "float32",
            "shape": [_ROWS, len(preprocessor.numeric_names)],
            "columns": list(preprocessor.numeric_names),
            "missing": "NaN, which is filled"
            if preprocessor.fill is not None
            else "none may be missing",
        }
        unit = torch.randn(_N_EXAMPLES, len(preprocessor.shift), generator=generator).double()
        examples.append(
            (unit * torch.tensor(preprocessor.scale) + torch.tensor(preprocessor.shift)).float()
        )
        if preprocessor.fill is not None:
            examples[0][0] = torch.nan
    if preprocessor.vocabularies:
        inputs[CATEGORIES] = {
            "type": "string",
            "shape": [_ROWS, len(preprocessor.vocabularies)],
            "columns": list(preprocessor.categorical_names),
            "missing": "the empty text",
            "words": dict(
                zip(preprocessor.categorical_names, preprocessor.vocabularies, strict=True)
            ),
        }
        counts = [RESERVED + len(words) for words in preprocessor.vocabularies]
        rows = [[(row + k) % count for k, count in enumerate(counts)] for row in range(_N_EXAMPLES)]
        # The code HIDDEN occurs only in augmentation, never in an input.
        codes = torch.tensor(rows)
        examples.append(torch.where(codes == HIDDEN, MISSING, codes))
    return inputs, examples


def _make_top_graph(trained: TrainedParty) -> Graph:
    recipe = trained.about.recipe
    active = [recipe.active] if recipe.active.features else []
    names = [party.name for party in (*active, *recipe.passives) if party.features]
    widths = {name: recipe.embedding_size(name) for name in names}
    about, preprocessor = trained.about, trained.preprocessor
    if about.party in widths and preprocessor is not None:
        widths[about.party] = width_of(recipe, about.party, about.encoder, preprocessor.spec)
    trees = isinstance(recipe.model.top, GbdtTop)
    inputs = {
        embedding_of(name): {"type": "float32", "shape": [_ROWS, width]}
        | ({"missing": "NaN, such as the whole row of an absent party"} if trees else {})
        for name, width in widths.items()
    }
    generator = torch.Generator().manual_seed(0)
    examples = [torch.randn(_N_EXAMPLES, width, generator=generator) for width in widths.values()]
    if trees:
        examples[-1][_N_EXAMPLES - 1] = torch.nan
    module = Joint(trained.models["top"].eval(), recipe.model.combine).eval()
    what = f"the top model of {trained.about.party}"
    model = _export_module(module, inputs, examples, OUTPUT, what)
    description = _about(trained, inputs) | {"what": "top"} | _describe_output(trained)
    return Graph(_add_description(model, description, OUTPUT), description)


def _describe_output(trained: TrainedParty) -> dict[str, Any]:
    """Describes the output of a top model or a student."""
    labels = trained.labels
    return {
        "task": trained.about.recipe.task.kind,
        "values": "the top model's outputs, before any sigmoid or softmax",
        "classes": list(labels.classes) if labels is not None else [],
    }


def _about(trained: TrainedParty, inputs: Mapping[str, Any]) -> dict[str, Any]:
    about = trained.about
    return {
        "party": about.party,
        "run_id": about.run_id,
        "recipe_digest": about.recipe_digest,
        "vfl": version("vfl"),
        "torch": torch.__version__,
        "opset": OPSET,
        "inputs": dict(inputs),
    }


def _export_module(
    module: nn.Module,
    inputs: Mapping[str, Any],
    examples: Sequence[Tensor],
    output: str,
    what: str,
) -> ModelProto:
    """Exports a module as ONNX for any number of rows, and compares both on a few rows.

    Raises InputError, which names the module ``what``, if the export fails or the results differ.
    """
    rows = torch.export.Dim(_ROWS)
    try:
        with _silence():
            program = torch.onnx.export(
                module,
                tuple(examples),
                dynamo=True,
                opset_version=OPSET,
                input_names=list(inputs),
                output_names=[output],
                # The one argument is a tuple of tensors.
                dynamic_shapes=(tuple({0: rows} for _ in examples),),
                external_data=False,
                verbose=False,
            )
    except ImportError as error:
        raise InputError(
            Code.CONFIG_INVALID,
            f"vfl export model: a package for ONNX is missing ({str(error).splitlines()[0]}). Run "
            "pip install '.[onnx]' in the clone of vfl.",
        ) from None
    # The exporter raises errors of many types, and a plug-in's model may raise any exception.
    except Exception as error:
        raise InputError(
            Code.MODEL_INVALID,
            f"{what} cannot be exported as ONNX ({type(error).__name__}). Export it as "
            "safetensors.",
        ) from error
    model: ModelProto = program.model_proto  # type: ignore[union-attr] # None only without dynamo
    _check_results(model, module, inputs, examples, what)
    return model


def _check_results(
    model: ModelProto,
    module: nn.Module,
    inputs: Mapping[str, Any],
    examples: Sequence[Tensor],
    what: str,
) -> None:
    """Raises InputError if the file and the module compute different results."""
    from onnx.reference import ReferenceEvaluator

    # The check uses another number and order of rows than the export.
    inputs_ = [example.flip(0)[: _N_EXAMPLES - 2] for example in examples]
    with torch.no_grad():
        expected = module(*inputs_).numpy()
    named_inputs = {name: example.numpy() for name, example in zip(inputs, inputs_, strict=True)}
    with _silence():
        results: Any = ReferenceEvaluator(model).run(None, named_inputs)
    outputs = np.asarray(results[0])
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    if outputs.shape != expected.shape or not np.allclose(
        outputs, expected, rtol=0.0, atol=TOLERANCE * scale
    ):
        raise InputError(
            Code.MODEL_INVALID,
            f"{what} has other results in ONNX than in torch. Export it as safetensors.",
        )


def _add_category_tables(model: ModelProto, vocabularies: Sequence[Sequence[str]]) -> None:
    """Makes the graph take texts instead of codes, with a table of categories for each column."""
    from onnx import TensorProto, helper

    graph = model.graph
    categories = next(input_ for input_ in graph.input if input_.name == CATEGORIES)
    codes = f"{CATEGORIES} as codes"
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name == CATEGORIES:
                node.input[place] = codes
    nodes, columns = [], []
    for k, words in enumerate(vocabularies):
        column_index, text, code = (
            f"{CATEGORIES} {part} {k}" for part in ("place", "text", "code")
        )
        graph.initializer.append(helper.make_tensor(column_index, TensorProto.INT64, [1], [k]))
        nodes.append(helper.make_node("Gather", [CATEGORIES, column_index], [text], axis=1))
        table = {"": MISSING} | {word: RESERVED + place for place, word in enumerate(words)}
        nodes.append(
            helper.make_node(
                "LabelEncoder",
                [text],
                [code],
                domain=_ML,
                keys_strings=list(table),
                values_int64s=list(table.values()),
                default_int64=UNKNOWN,
            )
        )
        columns.append(code)
    nodes.append(helper.make_node("Concat", columns, [codes], axis=1))
    other_nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *other_nodes])
    categories.type.tensor_type.elem_type = TensorProto.STRING
    model.opset_import.append(helper.make_opsetid(_ML, _ML_OPSET))


def _add_description(model: ModelProto, about: Mapping[str, Any], output: str) -> ModelProto:
    """Adds the description to the file's metadata, and checks that the model is valid ONNX."""
    from onnx import checker, helper

    # The exporter adds paths of this machine to the metadata, so this removes them.
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    del model.graph.metadata_props[:]
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        del value.metadata_props[:]
    for function in model.functions:
        del function.metadata_props[:]
    helper.set_model_props(model, {"vfl": json.dumps({**about, "output": output})})
    model.producer_name, model.producer_version = "vfl", str(about["vfl"])
    checker.check_model(model)
    return model


@contextmanager
def _silence() -> Iterator[None]:
    """Hides the exporter's log messages and warnings."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled_level)
