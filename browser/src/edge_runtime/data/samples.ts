/** `Samples`: local data that fits a model. */
import { EmptyData } from "../../federation/errors.ts";
import { classifies, type Manifest } from "../../federation/manifest.ts";
import { product } from "../../federation/space.ts";
import { takeRows, type Numbers, type Stored } from "./arrays.ts";
import { shuffled } from "./prng.ts";
import { checkInputs, convert, fitInputs, type InputFit } from "./input_adapter.ts";
import { fitTargets, type Labels } from "./targets.ts";

/** Inputs and labels as the person gave them; what of them a browser keeps. */
export interface Dataset {
  readonly name: string;
  readonly inputs: Stored;
  readonly labels: Stored;
  readonly classNames?: readonly string[];
}

const SPLIT = -1; // stands where an epoch does: no epoch's order is that of the split

export class Samples {
  readonly length: number;
  readonly labels: Labels;
  private readonly fit: InputFit;
  private readonly perLabel: number;

  constructor(
    private readonly data: Dataset,
    private readonly manifest: Manifest,
  ) {
    this.fit = fitInputs(data.name, data.inputs, manifest);
    this.length = data.inputs.shape[0]!;
    this.labels = fitTargets(data.name, data.labels, this.length, manifest);
    this.perLabel = product(manifest.labels.shape);
    checkInputs(data.name, data.inputs, this.fit, manifest);
    const ignored = manifest.loss.ignoreIndex;
    if (ignored !== undefined && this.labels instanceof BigInt64Array && this.labels.every((label) => label === BigInt(ignored))) {
      throw new EmptyData(`${data.name}: every label is ${ignored}, which does not count`);
    }
  }

  /** Split into (for training, held out), as `holdOut` chooses. */
  split(fraction: number, seed: number): readonly [Samples, Samples] {
    const held = holdOut(this.labels, this.length, this.areClasses, fraction, seed);
    const numbers = [...Array(this.length).keys()];
    return [this.only(numbers.filter((number) => !held.has(number))), this.only(numbers.filter((number) => held.has(number)))];
  }

  private only(numbers: readonly number[]): Samples {
    const { inputs, labels } = this.data;
    return new Samples({ ...this.data, inputs: takeRows(inputs, numbers), labels: takeRows(labels, numbers) }, this.manifest);
  }

  /** Whether each sample belongs to one class: a class number, or 0 or 1 for a single logit. */
  private get areClasses(): boolean {
    const { loss } = this.manifest;
    if (this.perLabel !== 1) return false;
    return classifies(loss) || (loss.name === "bce_with_logits" && [...this.labels].every((label) => Number(label) === 0 || Number(label) === 1));
  }

  /** Read inputs of some samples as the training graph takes them. */
  inputs(indices: ArrayLike<number>): Numbers {
    return convert(this.fit, takeRows(this.data.inputs, indices));
  }

  /** Read labels of some samples as the training graph takes them. */
  labelsOf(indices: ArrayLike<number>): Labels {
    const each = this.perLabel;
    const found = this.labels.slice(0, 0).constructor as new (length: number) => Labels;
    const chosen = new found(indices.length * each);
    for (let place = 0; place < indices.length; place++) {
      for (let i = 0; i < each; i++) chosen[place * each + i] = this.labels[indices[place]! * each + i]!;
    }
    return chosen;
  }
}

/** Choose the samples to hold out: about `fraction` of them, the same share of each class, never all. */
export function holdOut(labels: Labels, count: number, areClasses: boolean, fraction: number, seed: number): ReadonlySet<number> {
  let order = [...shuffled(count, seed, SPLIT)];
  if (areClasses) {
    const counts = new Map<number, number>();
    for (const label of labels) counts.set(Number(label), (counts.get(Number(label)) ?? 0) + 1);
    const label = (number: number): number => Number(labels[number]);
    order = order.sort((a, b) => label(a) - label(b)).filter((number) => counts.get(label(number))! > 1); // sorting is stable
  }
  const wanted = roundHalfToEven(count * fraction) || Number(fraction > 0);
  const held = Math.min(wanted, order.length, Math.max(0, count - 1));
  const half = Math.floor(order.length / 2);
  return new Set(Array.from({ length: held }, (_, i) => order[Math.floor((i * order.length + half) / held)]!)); // evenly through the classes
}

function roundHalfToEven(value: number): number {
  const floor = Math.floor(value);
  return value - floor === 0.5 ? floor + (floor % 2) : Math.round(value);
}
