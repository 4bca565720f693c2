/** A training step: loss and gradients of everything from one layer to the output. */
import { EmbraceError, messageOf, OutOfMemory } from "../federation/errors.ts";
import type { TensorSpec } from "../federation/manifest.ts";
import type { ParameterSpace, Vector } from "../federation/space.ts";
import { BoundSession } from "./bound_session.ts";
import type { DType, Numbers } from "./data/arrays.ts";
import type { Labels } from "./data/targets.ts";
import type { Provider } from "./runtime.ts";
import { isOutOfMemory, trainingSession } from "./session.ts";

/** A batch as the graph takes it. */
export interface Batch {
  readonly size: number;
  readonly inputs: Numbers;
  readonly labels: Labels;
}

/** Where a step reads and writes, in the runtime's memory. */
export interface Vectors {
  readonly parameters: Vector;
  readonly gradients: Vector;
}

/** What the trainer needs of a step. After a run `gradients` has gradients of weights and NEW VALUES of statistics. */
export interface GradientStep extends Vectors {
  run(batch: Batch, seed: number): Promise<number>;
  release(): Promise<void>;
}

const ENDINGS = { weight: ".grad", statistic: ".new" } as const;

export class TrainingStep implements GradientStep {
  readonly parameters: Vector;
  readonly gradients: Vector;
  private readonly loss: Vector;
  private readonly hasSeed: boolean;

  private constructor(
    private readonly session: BoundSession,
    space: ParameterSpace,
    firstLayer: number,
    private readonly entry: TensorSpec,
    private readonly labels: TensorSpec,
    vectors: Vectors | undefined,
  ) {
    const suffix = space.suffix(firstLayer);
    this.parameters = vectors?.parameters ?? session.vector(suffix.stop - suffix.start);
    this.gradients = vectors?.gradients ?? session.vector(this.parameters.length);
    this.loss = session.vector(1);
    const wanted = new Set(session.inputNames); // a graph may not need a parameter's old value
    this.hasSeed = wanted.has("seed");
    session.bindOutput("loss", this.loss, []);
    for (const { name, kind, shape } of space.layers.slice(firstLayer).flat()) {
      const { start, stop } = space.sliceOf(name);
      const place = [start - suffix.start, stop - suffix.start] as const;
      if (wanted.has(name)) session.bindInput(name, this.parameters.subarray(...place), shape);
      session.bindOutput(name + ENDINGS[kind], this.gradients.subarray(...place), shape);
    }
  }

  static async open(
    graph: Uint8Array<ArrayBuffer>,
    space: ParameterSpace,
    firstLayer: number,
    entry: TensorSpec,
    labels: TensorSpec,
    { provider, vectors }: { provider: Provider; vectors?: Vectors } = { provider: "wasm" },
  ): Promise<TrainingStep> {
    const session = new BoundSession(await trainingSession(graph, provider));
    try {
      return new TrainingStep(session, space, firstLayer, entry, labels, vectors);
    } catch (error) {
      await session.release();
      throw error;
    }
  }

  /** Run one forward and backward pass; return the loss, leave the gradients in `gradients`. */
  async run(batch: Batch, seed: number): Promise<number> {
    const { session, entry, labels } = this;
    try {
      session.feed("input", entry.dtype as DType, batch.inputs, [batch.size, ...entry.shape]);
      session.feed("labels", labels.dtype as DType, batch.labels, [batch.size, ...labels.shape]);
      if (this.hasSeed) session.feed("seed", "int64", BigInt64Array.of(BigInt(seed)), []);
      await session.run();
    } catch (error) {
      if (error instanceof OutOfMemory || isOutOfMemory(error)) throw new OutOfMemory(`not enough memory for a training step of ${batch.size} samples`);
      throw new EmbraceError(`a training step failed: ${messageOf(error)}`);
    }
    return this.loss[0]!;
  }

  async release(): Promise<void> {
    await this.session.release();
  }
}
