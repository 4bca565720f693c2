/** The bundle manifest: what an exported model consists of, as docs/reference/bundle.md explains it. Version 1. */
import { Field } from "./decode.ts";
import { BundleError } from "./errors.ts";
import { ParameterSpace, product, type Parameter } from "./space.ts";

export interface FileRef {
  readonly name: string;
  readonly sha256: string;
  readonly bytes: number;
}

/** Type and shape of a tensor for ONE sample: the batch dimension in front is left out. */
export interface TensorSpec {
  readonly dtype: string;
  readonly shape: readonly number[];
}

export interface Layer {
  readonly name: string;
  readonly input: TensorSpec;
  readonly output: TensorSpec;
  readonly parameters: readonly Parameter[];
  readonly activations: number;
  readonly macs: number;
  readonly forward: FileRef;
  readonly borrowed: readonly string[]; // weights of later layers that it uses
}

/** A place from which a device can train; a narrow one trains the first channels of every layer. */
export interface Boundary {
  readonly name: string;
  readonly layer: number;
  readonly lastSteps: number | undefined;
  readonly activations: number;
  readonly train: FileRef | undefined;
  readonly width: number | undefined;
  readonly narrow: readonly (readonly (readonly number[])[])[] | undefined;
  readonly stepMemory: readonly (readonly number[])[] | undefined; // batch sizes and the bytes of the graph at them
  readonly head: Layer | undefined; // with lastSteps: the steps before them, as a frozen layer
}

/** How stored values become inputs: (value × scale − mean) / std. */
export interface Preprocessing {
  readonly scale: number | undefined; // undefined: bytes are divided by 255, other numbers stay
  readonly mean: readonly number[]; // one for all, or one for each place of the first axis
  readonly std: readonly number[];
}

const PLAIN: Preprocessing = { scale: undefined, mean: [], std: [] };

export interface Loss {
  readonly name: LossName;
  readonly labelSmoothing: number;
  readonly ignoreIndex: number | undefined;
  readonly classesLast?: boolean; // classes stand along the last axis of an output
  readonly nextToken?: boolean; // a position is compared with the label of the next one
  readonly delta?: number; // huber
  readonly gamma?: number; // focal
}

export const LOSSES = ["cross_entropy", "bce_with_logits", "mse", "huber", "focal", "cosine"] as const;
export type LossName = (typeof LOSSES)[number];

/** Whether labels are class numbers. */
export function classifies(loss: Loss): boolean {
  return loss.name === "cross_entropy" || loss.name === "focal";
}

const FIELDS =
  "version name source opset loss input labels output vocabulary batch uses_seed layers boundaries tiers weights notes classes " +
  "preprocessing inputs tokenizer memory_plan";

export class Manifest {
  readonly space: ParameterSpace;

  constructor(
    readonly name: string,
    readonly loss: Loss,
    readonly input: TensorSpec,
    readonly labels: TensorSpec,
    readonly output: TensorSpec,
    readonly vocabulary: number | undefined,
    readonly batch: number,
    readonly layers: readonly Layer[],
    readonly boundaries: readonly Boundary[],
    readonly tiers: ReadonlyMap<string, string>,
    readonly weights: FileRef,
    readonly classes: readonly string[] | undefined, // in the order of their numbers
    readonly preprocessing: Preprocessing,
  ) {
    if (layers.length === 0) throw new BundleError("a bundle needs at least one layer");
    for (const boundary of boundaries) {
      if (boundary.layer >= layers.length) {
        throw new BundleError(`boundary '${boundary.name}' starts at layer ${boundary.layer}, which does not exist`);
      }
      const own = new Set(layers.slice(boundary.layer).flatMap((layer) => layer.parameters.map((p) => p.name)));
      if (boundary.head?.parameters.some(({ name }) => !own.has(name))) {
        throw new BundleError(`boundary '${boundary.name}': its head has parameters that the boundary does not train`);
      }
    }
    this.space = new ParameterSpace(layers.map((layer) => layer.parameters));
    const later = new Set<string>();
    for (const layer of [...layers].reverse()) {
      const strange = layer.borrowed.find((name) => !later.has(name));
      if (strange !== undefined) throw new BundleError(`layer '${layer.name}' borrows '${strange}', which no later layer has`);
      for (const { name } of layer.parameters) later.add(name);
    }
  }

  /** List all parameters that a layer uses, its own and those it borrows. */
  parametersOf(layer: Layer): readonly Parameter[] {
    if (layer.borrowed.length === 0) return layer.parameters;
    return [...layer.parameters, ...[...this.space].filter(({ name }) => layer.borrowed.includes(name))];
  }

  /** Count the classes a sample can belong to; undefined if its label is something else. */
  get classCount(): number | undefined {
    if (product(this.labels.shape) !== 1) return undefined;
    return this.loss.name === "bce_with_logits" ? 2 : this.labelCount;
  }

  /** Count the class numbers of a sample or of each of its positions; undefined without classes. */
  get labelCount(): number | undefined {
    return classifies(this.loss) ? this.output.shape.at(this.loss.classesLast ? -1 : 0) : undefined;
  }

  /** The boundary that trains everything. */
  get whole(): Boundary {
    const found = this.boundaries.find((b) => b.layer === 0 && b.lastSteps === undefined && b.narrow === undefined);
    if (found === undefined) throw new BundleError(`'${this.name}' has no boundary that trains the whole model`);
    return found;
  }

  /** Find a boundary by its own name or by a tier's name. */
  boundary(name: string): Boundary {
    const wanted = this.tiers.get(name) ?? name;
    const found = this.boundaries.find((boundary) => boundary.name === wanted);
    if (found === undefined) throw new BundleError(`no boundary or tier named '${name}' in '${this.name}'`);
    return found;
  }

  /** What runs once per round, so that training from a boundary can begin: the layers in front of it, its head. */
  frozen({ layer, head }: Boundary): Layer[] {
    return [...this.layers.slice(0, layer), ...(head === undefined ? [] : [head])];
  }

  /** The tensor that enters the training graphs of a boundary. */
  entry({ layer, head }: Boundary): TensorSpec {
    return head?.output ?? this.layers[layer]!.input;
  }

  /** The parameters that a boundary's graphs work on: all layers, with the narrow shapes if it is narrow. */
  spaceOf(boundary: Boundary): ParameterSpace {
    const { narrow } = boundary;
    if (narrow === undefined) return this.space;
    return new ParameterSpace(
      this.layers.map((layer, index) =>
        layer.parameters.map((parameter, place) => ({ ...parameter, shape: narrow[index]![place]! })),
      ),
    );
  }
}

/** Parse and check a manifest; an error names the field that is wrong. */
export function loads(text: string): Manifest {
  let data: unknown;
  try {
    data = JSON.parse(text);
  } catch {
    throw new BundleError("the manifest is no JSON");
  }
  return manifestOf(new Field(data, "manifest"));
}

function manifestOf(field: Field): Manifest {
  if (field.entries().some(([key]) => key === "stored")) {
    throw new BundleError("this model keeps frozen weights in a file of their own, which a page does not read; train it with 'embrace agent'");
  }
  if (field.entries().some(([key]) => key === "loss_chunk")) {
    throw new BundleError("this language model makes its outputs in pieces, which a page does not score; train it with 'embrace agent'");
  }
  const get = field.table(FIELDS.split(" "));
  get("version").integer(1, 1);
  if (get("loss").entries().some(([key]) => key === "own" || key === "heads")) {
    throw new BundleError("this model has several heads or a loss of its own, which a page does not score; train it with 'embrace agent'");
  }
  const loss = get("loss").table("name label_smoothing ignore_index classes_last next_token delta gamma".split(" "));
  return new Manifest(
    get("name").text(),
    {
      name: loss("name").oneOf(LOSSES),
      labelSmoothing: loss("label_smoothing").or(0, (f) => f.number(0, 1)),
      ignoreIndex: loss("ignore_index").optional((f) => f.integer(Number.MIN_SAFE_INTEGER)),
      classesLast: loss("classes_last").or(false, (f) => f.flag()),
      nextToken: loss("next_token").or(false, (f) => f.flag()),
      delta: loss("delta").or(1, (f) => f.number(Number.MIN_VALUE)),
      gamma: loss("gamma").or(2, (f) => f.number(1)),
    },
    tensorSpec(get("input")),
    tensorSpec(get("labels")),
    tensorSpec(get("output")),
    get("vocabulary").optional((f) => f.integer(1)),
    get("batch").integer(1),
    get("layers").list(layerOf),
    get("boundaries").list(boundaryOf),
    new Map(get("tiers").entries().map(([tier, name]) => [tier, name.text()])),
    fileRef(get("weights")),
    get("classes").optional((f) => f.list((name) => name.text())),
    get("preprocessing").optional(preprocessingOf) ?? PLAIN,
  );
}

function preprocessingOf(field: Field): Preprocessing {
  const get = field.table(["scale", "mean", "std"]);
  const numbers = (field: Field): number[] => field.list((value) => value.number());
  return { scale: get("scale").optional((f) => f.number()), mean: get("mean").or([], numbers), std: get("std").or([], numbers) };
}

function tensorSpec(field: Field): TensorSpec {
  const get = field.table(["dtype", "shape"]);
  return { dtype: get("dtype").text(), shape: shapeOf(get("shape")) };
}

function shapeOf(field: Field): number[] {
  const shape = field.list((length) => length.integer(0, 2 ** 31));
  if (product(shape) > Number.MAX_SAFE_INTEGER) throw new BundleError(`impossible shape ${shape}`);
  return shape;
}

function fileRef(field: Field): FileRef {
  const get = field.table(["name", "sha256", "bytes"]);
  const sha256 = get("sha256").text();
  if (!/^[0-9a-f]{64}$/.test(sha256)) throw new BundleError(`sha256 must be 64 hexadecimal digits, got '${sha256}'`);
  return { name: get("name").text(), sha256, bytes: get("bytes").integer() };
}

function layerOf(field: Field): Layer {
  const get = field.table("name input output parameters activations macs dropouts forward borrowed packed measuring".split(" "));
  return {
    name: get("name").text(),
    input: tensorSpec(get("input")),
    output: tensorSpec(get("output")),
    parameters: get("parameters").list(parameterOf),
    activations: get("activations").integer(),
    macs: get("macs").integer(),
    forward: fileRef(get("forward")),
    borrowed: get("borrowed").or([], (f) => f.list((name) => name.text())),
  };
}

function parameterOf(field: Field): Parameter {
  const get = field.table(["name", "kind", "shape"]);
  return { name: get("name").text(), kind: get("kind").oneOf(["weight", "statistic"]), shape: shapeOf(get("shape")) };
}

function boundaryOf(field: Field): Boundary {
  const get = field.table("name layer last_steps activations train ort_training width narrow step_memory head".split(" "));
  return {
    name: get("name").text(),
    layer: get("layer").integer(),
    lastSteps: get("last_steps").optional((f) => f.integer(1)),
    activations: get("activations").integer(),
    train: get("train").optional(fileRef),
    width: get("width").optional((f) => f.number(0, 1)),
    narrow: get("narrow").optional((f) => f.list((layer) => layer.list(shapeOf))),
    stepMemory: get("step_memory").optional((f) => f.list((pair) => pair.list((value) => value.integer()))),
    head: get("head").optional(layerOf),
  };
}
