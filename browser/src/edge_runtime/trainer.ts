/** The one local training loop, for every algorithm: gradient, chained local rule, in-place update of a flat vector. */
import { coverage, type Coverage } from "../federation/coverage.ts";
import type { Vectors } from "../federation/device_task.ts";
import { NonFiniteLoss, OutOfMemory } from "../federation/errors.ts";
import type { Boundary, Layer, Manifest } from "../federation/manifest.ts";
import { atOnce, stepsFor, type Report, type Task } from "../federation/messages.ts";
import { LocalStep, runs } from "../federation/rules/chain.ts";
import { clip } from "../federation/rules/clipping.ts";
import type { Bytes, Slice, Vector } from "../federation/space.ts";
import type { ActivationStore } from "./activations.ts";
import { augment } from "./data/augment.ts";
import { sampleBits, shuffled } from "./data/prng.ts";
import type { Samples } from "./data/samples.ts";
import { storeActivations, type ForwardPlan, type LayerSource, type Progress } from "./forward.ts";
import { openStep, type Note } from "./gpu_step.ts";
import { OrderedDropoutStep } from "./ordered_dropout.ts";
import type { Batch, GradientStep } from "./step.ts";
import { Stopwatch } from "./timing.ts";

const DROPOUT = 2 ** 32; // a draw of its own: not one of the augmentation's
const EPOCHS = 2 ** 24; // more than a task has

/** Vectors that come with a task, over the suffix that is trained. They stay unchanged. */
export interface Received {
  readonly parameters: Vector;
  readonly brought: Vectors;
  readonly reference: Vector; // what an update is the difference from
  readonly stepsBefore: number; // that the device has taken with what it brings
}

/** What training gave. The vectors are the trainer's own, in the runtime's memory, and change with its next task. */
export interface Outcome {
  readonly local: LocalStep;
  readonly report: Report;
}

interface StoredActivations {
  readonly rows: ActivationStore;
  readonly layer: number;
  readonly head: Layer | undefined;
  readonly task: Task;
  readonly lineage: string;
  readonly version: string;
}

/** The gradient of a batch whose samples go through the graph a few at a time; statistics follow part after part. */
class MeanGradient {
  private readonly mean: Vector;

  constructor(
    private readonly step: GradientStep,
    private readonly statistics: readonly Slice[],
  ) {
    this.mean = new Float32Array(step.gradients.length);
  }

  /** Add the gradients of the last run; the last of a batch puts the mean in their place and begins anew. */
  add(share: number, last: boolean): void {
    const { mean, step } = this;
    const { gradients } = step;
    const fresh = this.statistics.map(({ start, stop }) => gradients.slice(start, stop));
    const single = Math.fround(share);
    for (let i = 0; i < mean.length; i++) mean[i] = mean[i]! + Math.fround(gradients[i]! * single);
    if (last) {
      gradients.set(mean);
      mean.fill(0);
    }
    this.statistics.forEach(({ start }, place) => (last ? gradients : step.parameters).set(fresh[place]!, start));
  }
}

/** Trains one device's data, task after task; keeps activations and the session where the next task can use them. */
export class Trainer {
  private step: { graphs: string; step: GradientStep } | undefined;
  private stored: StoredActivations | undefined;

  constructor(
    public source: LayerSource,
    private readonly samples: Samples,
    private readonly graphOf: (boundary: Boundary) => Promise<Bytes>,
    private readonly plan: Omit<ForwardPlan, "storedAs">,
    private readonly progress: Progress = () => {},
    private readonly note: Note = () => {}, // of what a person may want to know
  ) {}

  private get manifest(): Manifest {
    return this.source.manifest;
  }

  /** Run a task. A failure leaves nothing behind but this trainer's own buffers. */
  async run(task: Task, received: Received, watch = new Stopwatch()): Promise<Outcome> {
    const covered = coverage(this.manifest, task.boundary);
    const steps = stepsFor(task, this.samples.length);
    try {
      const { local, losses } = await watch.part("load", async () => {
        await this.prepare(task, covered, watch);
        return watch.part("training", () => this.train(task, steps, covered, received, watch));
      });
      return { local, report: this.report(task, steps, losses, watch) };
    } catch (error) {
      if (!(error instanceof OutOfMemory)) throw error;
      await this.close();
      throw new OutOfMemory(`training from '${covered.boundary.name}': ${error.message}`);
    }
  }

  /** Give back the session and the stored activations. */
  async close(): Promise<void> {
    await this.step?.step.release();
    this.step = undefined;
    this.stored?.rows.close();
    this.stored = undefined;
  }

  private report(task: Task, steps: number, losses: readonly number[], watch: Stopwatch): Report {
    return {
      status: "done",
      boundary: this.manifest.tiers.get(task.boundary) ?? task.boundary,
      engine: "portable",
      profile: "fast",
      round: task.round,
      steps,
      batch: this.batchSize(task),
      samples: this.samples.length,
      loss: losses.reduce((sum, loss) => sum + loss, 0) / losses.length,
      last_loss: losses.at(-1)!,
      seconds: watch.timings(),
      memory: {},
      bytes: { stored_activations: this.stored?.rows.bytes ?? 0 },
      message: "",
      lost_state: false,
      evaluation: {},
    };
  }

  private batchSize(task: Task): number {
    return Math.min(task.batch, this.samples.length);
  }

  /** Store fresh activations first, open the session afterwards: with little memory both do not fit at once. */
  private async prepare(task: Task, covered: Coverage, watch: Stopwatch): Promise<void> {
    const { boundary } = covered;
    const frozen = this.manifest.frozen(boundary);
    if (frozen.length === 0 || !this.stillGood(task, boundary)) {
      this.stored?.rows.close();
      this.stored = frozen.length > 0 ? await this.store(task, boundary, watch) : undefined;
    }
    const graphs = covered.graphs.map((graph) => graph.name).join("|");
    if (this.step?.graphs !== graphs) {
      await this.step?.step.release(); // the old one goes before the new one comes
      this.step = undefined;
      this.step = { graphs, step: await this.open(covered) };
    }
  }

  private async open(covered: Coverage): Promise<GradientStep> {
    const steps: GradientStep[] = [];
    for (const boundary of covered.graphs) {
      const space = this.manifest.spaceOf(boundary);
      const entry = this.manifest.entry(boundary);
      steps.push(await openStep(await this.graphOf(boundary), space, boundary.layer, entry, this.manifest.labels, this.note));
    }
    return steps.length === 1 ? steps[0]! : new OrderedDropoutStep(this.manifest, covered.ordered, steps);
  }

  private stillGood(task: Task, boundary: Boundary): boolean {
    const { stored } = this;
    if (stored === undefined || stored.layer !== boundary.layer || stored.head !== boundary.head || stored.task.activations !== task.activations) return false;
    if (stored.task.crop !== task.crop || stored.task.flip !== task.flip) return false;
    const age = task.round - stored.task.round;
    const recent = 0 <= age && age < task.refreshEvery && stored.task.round >= task.goodSince;
    if (task.refreshEvery > 1 && recent && stored.lineage === this.source.lineage) return true;
    const sameData = (!task.crop && !task.flip) || (stored.task.seed === task.seed && age === 0);
    return sameData && stored.version === this.source.version;
  }

  private async store(task: Task, boundary: Boundary, watch: Stopwatch): Promise<StoredActivations> {
    const plan = { ...this.plan, storedAs: task.activations };
    const inputs = (indices: Int32Array) => this.inputs(task, indices, task.round * EPOCHS);
    const rows = await storeActivations(this.source, this.manifest.frozen(boundary), inputs, this.samples.length, plan, watch, this.progress);
    return { rows, layer: boundary.layer, head: boundary.head, task, lineage: this.source.lineage, version: this.source.version };
  }

  private async train(task: Task, steps: number, covered: Coverage, received: Received, watch: Stopwatch): Promise<{ local: LocalStep; losses: number[] }> {
    const { step } = this.step!;
    const { boundary } = covered;
    step.parameters.set(received.parameters);
    const start = { x: step.parameters, steps, rate: task.rate, origin: received.reference, brought: received.brought, stepsBefore: received.stepsBefore };
    const { weights, statistics } = runs(this.manifest.spaceOf(boundary), boundary.layer, covered);
    const local = new LocalStep(task.rules, start, weights, statistics);
    const losses: number[] = [];
    const mean = atOnce(task) < this.batchSize(task) ? new MeanGradient(step, statistics) : undefined;
    for (const { number, epoch, indices } of batches(this.samples.length, this.batchSize(task), task, steps)) {
      await this.progress("train", number, steps);
      const loss = await this.gradient(task, step, mean, number, epoch, indices, watch);
      if (!Number.isFinite(loss)) {
        throw new NonFiniteLoss(
          `the loss is ${loss} at step ${number + 1} of round ${task.round} with the rate ${task.rate}; ` +
            "use a smaller rate, or look for extreme values in the data",
        );
      }
      losses.push(loss);
      await watch.part("optimiser", () => {
        if (task.clipNorm !== undefined) clip(step.gradients, weights, task.clipNorm);
        local.step(step.gradients, task.rate);
      });
    }
    await this.progress("train", steps, steps);
    if (!local.x.every(Number.isFinite)) {
      throw new NonFiniteLoss(`parameters are not finite after round ${task.round}; use a smaller rate`);
    }
    return { local, losses };
  }

  /** Leave the gradient of a batch in the step's vector, whether its samples go through at once or in parts. */
  private async gradient(
    task: Task,
    step: GradientStep,
    mean: MeanGradient | undefined,
    number: number,
    epoch: number,
    indices: Int32Array,
    watch: Stopwatch,
  ): Promise<number> {
    const size = Math.min(indices.length, atOnce(task));
    const count = Math.ceil(indices.length / size);
    const parts = Array.from({ length: count }, (_, place) => indices.subarray(place * size, (place + 1) * size));
    const counted = parts.map((part) => this.counted(part));
    const all = Math.max(1, counted.reduce((sum, each) => sum + each, 0));
    let loss = 0;
    for (const [place, part] of parts.entries()) {
      const share = counted[place]! / all;
      const batch = await watch.part("activation_io", () => this.read(task, part, epoch));
      loss += share * (await step.run(batch, stepSeed(task, number * count + place)));
      if (mean !== undefined) await watch.part("optimiser", () => mean.add(share, place === count - 1));
    }
    return loss;
  }

  /** Count what the loss of some samples is a mean over: the samples, or labels that are not ignored. */
  private counted(part: Int32Array): number {
    const { ignoreIndex, nextToken } = this.manifest.loss;
    if (ignoreIndex === undefined) return part.length;
    const labels = this.samples.labelsOf(part);
    const each = labels.length / part.length;
    let found = 0;
    for (let i = 0; i < labels.length; i++) {
      if (!(nextToken && i % each === 0) && Number(labels[i]) !== ignoreIndex) found++;
    }
    return found;
  }

  private read(task: Task, indices: Int32Array, epoch: number): Batch {
    const inputs = this.stored ? this.stored.rows.read(indices) : this.inputs(task, indices, epoch);
    return { size: indices.length, inputs, labels: this.samples.labelsOf(indices) };
  }

  private inputs(task: Task, indices: Int32Array, epoch: number): ReturnType<Samples["inputs"]> {
    const found = this.samples.inputs(indices);
    if (!(found instanceof Float32Array)) return found;
    return augment(task, found as Vector, this.manifest.input.shape, indices, task.seed, epoch);
  }
}

/** Yield the samples of each step: epoch after epoch in a new order, full batches only. */
export function* batches(count: number, batch: number, task: Task, steps: number): Iterable<{ number: number; epoch: number; indices: Int32Array }> {
  const each = Math.max(1, Math.floor(count / batch));
  let order: Int32Array = new Int32Array();
  for (let number = 0; number < steps; number++) {
    const epoch = task.round * EPOCHS + Math.floor(number / each);
    const place = number % each;
    if (place === 0) order = shuffled(count, task.seed, epoch);
    yield { number, epoch, indices: order.subarray(place * batch, (place + 1) * batch) };
  }
}

/** Derive the seed of a step's dropout masks: the same for every engine. */
export function stepSeed(task: Pick<Task, "seed" | "round">, number: number): number {
  return Number(sampleBits(task.seed, task.round, number, DROPOUT) >> 33n);
}
