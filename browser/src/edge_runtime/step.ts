/** A training step: loss and gradients of everything from one layer to the output. */
import { EmbraceError, messageOf, OutOfMemory } from "../federation/errors.ts";
import type { TensorSpec } from "../federation/manifest.ts";
import type { ParameterSpace, Vector } from "../federation/space.ts";
import type { DType, Numbers } from "./data/arrays.ts";
import type { Labels } from "./data/targets.ts";
import { isOutOfMemory, tensor, trainingSession, type Session } from "./session.ts";

/** A batch as the graph takes it. */
export interface Batch {
  readonly size: number;
  readonly inputs: Numbers;
  readonly labels: Labels;
}

/** What the trainer needs of a step. After a run `gradients` has gradients of weights and NEW VALUES of statistics. */
export interface GradientStep {
  readonly parameters: Vector;
  readonly gradients: Vector;
  run(batch: Batch, seed: number): Promise<number>;
  release(): Promise<void>;
}

const ENDINGS = { weight: ".grad", statistic: ".new" } as const;

export class TrainingStep implements GradientStep {
  readonly parameters: Vector;
  readonly gradients: Vector;
  private readonly outputs: string[];

  private constructor(
    private readonly session: Session,
    private readonly space: ParameterSpace,
    private readonly firstLayer: number,
    private readonly entry: TensorSpec,
    private readonly labels: TensorSpec,
  ) {
    const suffix = space.suffix(firstLayer);
    this.parameters = new Float32Array(suffix.stop - suffix.start);
    this.gradients = new Float32Array(this.parameters.length);
    this.outputs = ["loss", ...this.views().map(({ output }) => output)];
  }

  static async open(graph: Uint8Array<ArrayBuffer>, space: ParameterSpace, firstLayer: number, entry: TensorSpec, labels: TensorSpec): Promise<TrainingStep> {
    return new TrainingStep(await trainingSession(graph), space, firstLayer, entry, labels);
  }

  /** Run one forward and backward pass; return the loss, leave the gradients in `gradients`. */
  async run(batch: Batch, seed: number): Promise<number> {
    const wanted = new Set(this.session.inputNames); // a graph may not need a parameter's old value
    const feeds: Record<string, ReturnType<typeof tensor>> = {
      input: tensor(this.entry.dtype as DType, batch.inputs, [batch.size, ...this.entry.shape]),
      labels: tensor(this.labels.dtype as DType, batch.labels, [batch.size, ...this.labels.shape]),
    };
    if (wanted.has("seed")) feeds.seed = tensor("int64", BigInt64Array.of(BigInt(seed)), []);
    for (const { name, shape, start, stop } of this.views()) {
      if (wanted.has(name)) feeds[name] = tensor("float32", this.parameters.subarray(start, stop), shape);
    }
    let found: Awaited<ReturnType<Session["run"]>>;
    try {
      found = await this.session.run(feeds, this.outputs);
    } catch (error) {
      if (isOutOfMemory(error)) throw new OutOfMemory(`not enough memory for a training step of ${batch.size} samples`);
      throw new EmbraceError(`a training step failed: ${messageOf(error)}`);
    }
    for (const { output, start } of this.views()) this.gradients.set(found[output]!.data as Float32Array, start);
    return (found.loss!.data as Float32Array)[0]!;
  }

  async release(): Promise<void> {
    await this.session.release();
  }

  private views(): { name: string; output: string; shape: readonly number[]; start: number; stop: number }[] {
    const origin = this.space.suffix(this.firstLayer).start;
    return this.space.layers.slice(this.firstLayer).flat().map(({ name, kind, shape }) => {
      const where = this.space.sliceOf(name);
      return { name, output: name + ENDINGS[kind], shape, start: where.start - origin, stop: where.stop - origin };
    });
  }
}
