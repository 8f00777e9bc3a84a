"""A trained party's models as ONNX files, for programs without torch.

The encoder's file takes the party's own columns as they are, in the units of its table: filling,
scaling and coding are part of the graph. A JSON file, which is also in the ONNX file's metadata,
says what the inputs and outputs are. The active party's top model is a separate file, which takes
one embedding of each party. So is its student, which takes the party's own columns only.
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
# Opset of the default domain. ONNX Runtime knows it since 1.14.
OPSET = 18
# Domain and opset of ``ai.onnx.ml``, which has the table of categories.
_ML, _ML_OPSET = "ai.onnx.ml", 3
NUMBERS, CATEGORIES, IMAGES = "numbers", "categories", "images"
OUTPUT = "output"
_ROWS = "rows"
# Number of rows with which the exported file is compared.
_N_EXAMPLES = 5
# How far an embedding may be from torch's, relative to its largest number if that is above 1.
TOLERANCE = 1e-5


def embedding_of(party: str) -> str:
    """Returns the name of a party's embedding in the files."""
    return f"embedding of {party}"


class OnnxPreparation(nn.Module):
    """An encoder after the preparation of its rows: see ``Preprocessor.transform``.

    Takes, of those that the party has, numbers [B, F] with NaN for a missing one, or images [B, C,
    H, W] in 0..1, as float32, and codes of categories [B, K] as int64.
    """

    def __init__(self, encoder: nn.Module, made: Preprocessor) -> None:
        super().__init__()
        self.encoder = encoder
        self._one_hot, self._flatten = made.one_hot, made.flatten
        self._widths = [len(words) for words in made.vocabularies]
        self._has_values = made.image_shape is not None or bool(made.numeric_names)
        shape = (-1, *(1 for _ in (made.image_shape or ())[1:]))
        self.shift, self.scale = (
            nn.Buffer(torch.tensor(values, dtype=torch.float64).reshape(shape), persistent=False)
            for values in (made.shift, made.scale)
        )
        fill = None if made.fill is None else torch.tensor(made.fill, dtype=torch.float32)
        if fill is not None and made.image_shape is not None:
            fill = fill.reshape(made.image_shape)
        self.fill = nn.Buffer(fill, persistent=False) if fill is not None else None

    def forward(self, *inputs: Tensor) -> Tensor:
        """Embeds raw rows."""
        rest = list(inputs)
        columns = [self._scale(rest.pop(0))] if self._has_values else []
        codes_BK = rest.pop(0) if self._widths else None
        if codes_BK is not None and self._one_hot:
            columns += [
                self._columns(codes_BK[:, k], width) for k, width in enumerate(self._widths)
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
    def _columns(codes_B: Tensor, words: int) -> Tensor:
        """A column of 0 and 1 for "missing" and for each word; "unknown" is all zeros."""
        place_B1 = (codes_B - HIDDEN).clamp(min=0).unsqueeze(1)
        is_known_B1 = (codes_B != UNKNOWN).unsqueeze(1)
        return ((place_B1 == torch.arange(1 + words)) & is_known_B1).float()


class Joint(nn.Module):
    """The top model after the combination of the parties' embeddings."""

    def __init__(self, top: nn.Module, rule: Combine) -> None:
        super().__init__()
        self.top, self._rule = top, rule

    def forward(self, *embeddings: Tensor) -> Tensor:
        """Scores rows by one embedding of each party, [B, D] each."""
        out: Tensor = self.top(combine(self._rule, embeddings))
        return out


@dataclass(frozen=True)
class Graph:
    """One file to write: ``about`` describes it."""

    model: ModelProto
    about: dict[str, Any]


def export(trained: TrainedParty, path: Path) -> list[Path]:
    """Writes ``path``, an encoder, ``<name>-top.onnx`` at the active party, ``<name>-student.onnx``
    if it has trained a student, and ``<name>.json``, which describes them. Returns the files. Only
    the owner may read them.

    Raises InputError if there is nothing to export, if a model cannot be written as ONNX or
    computes something else there, if packages are missing, or if a file exists.
    """
    graphs = _graphs(trained, path)
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
    whole = {file_path.name: graph.about for file_path, graph in graphs.items()}
    with private_file(description) as file:
        file.write(f"{json.dumps(whole, indent=1)}\n".encode())
    return [*graphs, description]


def _graphs(trained: TrainedParty, path: Path) -> dict[Path, Graph]:
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
            f"a run of {kinds} trains neither encoder nor top model, so there is nothing to export."
            " Give a run of another method.",
        )
    if about.recipe.model.precision != "float32":
        raise InputError(
            Code.MODEL_INVALID,
            f"the models of {about.party} were trained in {about.recipe.model.precision}, and an "
            "ONNX file computes other embeddings. Export them as safetensors.",
        )
    if trained.preprocessor is not None and trained.preprocessor.quantiles is not None:
        raise InputError(
            Code.MODEL_INVALID,
            f"the columns of {about.party} have data.scale = 'quantile', which is not written as "
            "ONNX. Export the models as safetensors.",
        )
    graphs: dict[Path, Graph] = {}
    if "encoder" in models and trained.preprocessor is not None:
        graphs[path] = _encoder(trained, trained.preprocessor)
    # A network that is cut in two has its upper half in another model.
    if "top" in models and "tail" not in models:
        graphs[path.with_name(f"{path.stem}-top{SUFFIX}")] = _top(trained)
    if SOLO in models and trained.preprocessor is not None:
        graphs[path.with_name(f"{path.stem}-student{SUFFIX}")] = _student(
            trained, trained.preprocessor
        )
    return graphs


def _encoder(trained: TrainedParty, made: Preprocessor) -> Graph:
    party, kind = trained.about.party, trained.about.encoder.kind
    what = f"the encoder of {party} (kind {kind!r})"
    # The name of the top model's input for it. No value inside a graph has a blank in its name.
    output = embedding_of(party)
    of = trained.models["encoder"]
    return _on_columns(trained, made, of, output, what, {"what": "encoder", "encoder": kind})


def _student(trained: TrainedParty, made: Preprocessor) -> Graph:
    what = f"the student of {trained.about.party}"
    about = {"what": "student"} | _describe_output(trained)
    return _on_columns(trained, made, trained.models[SOLO], OUTPUT, what, about)


def _on_columns(
    trained: TrainedParty,
    made: Preprocessor,
    encoder: nn.Module,
    output: str,
    what: str,
    more: Mapping[str, Any],
) -> Graph:
    """Makes the graph of a module that takes the party's own columns; ``more``: to describe it."""
    inputs, examples = _columns(made)
    module = OnnxPreparation(deterministic(encoder.eval()), made).eval()
    model = _export_module(module, inputs, examples, output, what)
    if made.vocabularies:
        _take_words(model, made.vocabularies)
    about = _about(trained, inputs) | dict(more)
    return Graph(_add_description(model, about, output), about)


def _columns(made: Preprocessor) -> tuple[dict[str, dict[str, Any]], list[Tensor]]:
    """Returns a description of the inputs that stand for a party's own columns, and examples."""
    inputs: dict[str, dict[str, Any]] = {}
    examples: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    if made.image_shape is not None:
        inputs[IMAGES] = {
            "type": "float32",
            "shape": [_ROWS, *made.image_shape],
            "values": "pixels in 0..1 (bytes divided by 255), or numbers in the scale of training",
        }
        examples.append(torch.rand(_N_EXAMPLES, *made.image_shape, generator=generator))
    elif made.numeric_names:
        inputs[NUMBERS] = {
            "type": "float32",
            "shape": [_ROWS, len(made.numeric_names)],
            "columns": list(made.numeric_names),
            "missing": "NaN, which is filled" if made.fill is not None else "none may be missing",
        }
        unit = torch.randn(_N_EXAMPLES, len(made.shift), generator=generator).double()
        examples.append((unit * torch.tensor(made.scale) + torch.tensor(made.shift)).float())
        if made.fill is not None:
            examples[0][0] = torch.nan
    if made.vocabularies:
        inputs[CATEGORIES] = {
            "type": "string",
            "shape": [_ROWS, len(made.vocabularies)],
            "columns": list(made.categorical_names),
            "missing": "the empty text",
            "words": dict(zip(made.categorical_names, made.vocabularies, strict=True)),
        }
        counts = [RESERVED + len(words) for words in made.vocabularies]
        rows = [[(row + k) % count for k, count in enumerate(counts)] for row in range(_N_EXAMPLES)]
        # No word has the code of what augmentation hides.
        codes = torch.tensor(rows)
        examples.append(torch.where(codes == HIDDEN, MISSING, codes))
    return inputs, examples


def _top(trained: TrainedParty) -> Graph:
    recipe = trained.about.recipe
    active = [recipe.active] if recipe.active.features else []
    names = [party.name for party in (*active, *recipe.passives) if party.features]
    widths = {name: recipe.embedding_size(name) for name in names}
    about, made = trained.about, trained.preprocessor
    if about.party in widths and made is not None:
        widths[about.party] = width_of(recipe, about.party, about.encoder, made.spec)
    trees = isinstance(recipe.model.top, GbdtTop)
    inputs = {
        embedding_of(name): {"type": "float32", "shape": [_ROWS, width]}
        | ({"missing": "NaN, such as a whole row of a party that is away"} if trees else {})
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
    """Returns what ``OUTPUT`` is."""
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
    """Writes a module as ONNX, for any number of rows, and compares the two on a few rows. Raises
    InputError with ``what``.
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
                # The module takes any number of tensors, as one argument.
                dynamic_shapes=(tuple({0: rows} for _ in examples),),
                external_data=False,
                verbose=False,
            )
    except ImportError as error:
        raise InputError(
            Code.CONFIG_INVALID,
            f"vfl export model: ONNX cannot be written here ({str(error).splitlines()[0]}). Run "
            "pip install '.[onnx]' in the clone of vfl.",
        ) from None
    # The exporter's errors are of many types, and a plug-in's model may raise any.
    except Exception as error:
        raise InputError(
            Code.MODEL_INVALID,
            f"{what} cannot be written as ONNX ({type(error).__name__}). Export it as safetensors.",
        ) from error
    model: ModelProto = program.model_proto  # type: ignore[union-attr] # None only without dynamo
    _compare(model, module, inputs, examples, what)
    return model


def _compare(
    model: ModelProto,
    module: nn.Module,
    inputs: Mapping[str, Any],
    examples: Sequence[Tensor],
    what: str,
) -> None:
    """Raises InputError if the file and the module compute different results."""
    from onnx.reference import ReferenceEvaluator

    # Other rows, and another number of them, than those that the exporter has seen.
    inputs_ = [example.flip(0)[: _N_EXAMPLES - 2] for example in examples]
    with torch.no_grad():
        want = module(*inputs_).numpy()
    fed = {name: example.numpy() for name, example in zip(inputs, inputs_, strict=True)}
    with _silence():
        results: Any = ReferenceEvaluator(model).run(None, fed)
    got = np.asarray(results[0])
    scale = max(1.0, float(np.abs(want).max(initial=0.0)))
    if got.shape != want.shape or not np.allclose(got, want, rtol=0.0, atol=TOLERANCE * scale):
        raise InputError(
            Code.MODEL_INVALID,
            f"{what} has other results in ONNX than in torch. Export it as safetensors.",
        )


def _take_words(model: ModelProto, vocabularies: Sequence[Sequence[str]]) -> None:
    """Lets the graph take texts in the place of codes: a table of words for each column."""
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
        at, text, code = (f"{CATEGORIES} {part} {k}" for part in ("place", "text", "code"))
        graph.initializer.append(helper.make_tensor(at, TensorProto.INT64, [1], [k]))
        nodes.append(helper.make_node("Gather", [CATEGORIES, at], [text], axis=1))
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
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *rest])
    categories.type.tensor_type.elem_type = TensorProto.STRING
    model.opset_import.append(helper.make_opsetid(_ML, _ML_OPSET))


def _add_description(model: ModelProto, about: Mapping[str, Any], output: str) -> ModelProto:
    """Adds the description to the file's metadata, and checks that the whole is ONNX."""
    from onnx import checker, helper

    # What the exporter notes of each node has paths of this machine.
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
    """Hides the exporter's own messages: a failure is reported in one sentence."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
