/** One local step: every rule in turn, then x ← x − rate·g, block by block so that a block stays in the cache. */
import type { Coverage } from "../coverage.ts";
import type { Vectors } from "../device_task.ts";
import type { ParameterSpace, Slice, Vector } from "../space.ts";
import { minus, type LocalRule, type Running, type Start } from "./rule.ts";

const { fround } = Math;
const BLOCK = 32768; // elements

/** The chained rules at work on one task. Rules see and move weights only; `start.x` is moved in place. */
export class LocalStep {
  readonly x: Vector;
  rates = 0; // sum over the steps run so far
  steps = 0;
  private readonly received: Vector;
  private readonly running: readonly Running[];

  constructor(
    rules: readonly LocalRule[],
    start: Start,
    private readonly weights: readonly Slice[],
    private readonly statistics: readonly Slice[],
  ) {
    this.x = start.x;
    this.received = start.origin;
    const before = this.x.slice();
    this.running = rules.map((rule) => rule.begin(start));
    // A rule that moved x does not know which elements are trained weights.
    let end = 0;
    for (const run of [...weights, { start: this.x.length, stop: this.x.length }]) {
      this.x.set(before.subarray(end, run.start), end);
      end = run.stop;
    }
  }

  /** Take one step. `gradients` holds gradients of the weights, which are changed, and new values of the statistics. */
  step(gradients: Vector, rate: number): void {
    const { x } = this;
    const single = fround(rate);
    for (const rule of this.running) rule.beginStep();
    for (const run of this.weights) {
      for (let start = run.start; start < run.stop; start += BLOCK) {
        const stop = Math.min(start + BLOCK, run.stop);
        for (const rule of this.running) rule.direct(start, stop, gradients, x);
        for (let i = start; i < stop; i++) x[i] = x[i]! - fround(gradients[i]! * single);
      }
    }
    for (const run of this.statistics) x.set(gradients.subarray(run.start, run.stop), run.start);
    this.rates += rate;
    this.steps += 1;
  }

  /** Compute what the device reports: how far x is from the server's, without the movement that was the server's. */
  update(): Vector {
    const moved = minus(this.x, this.received);
    for (const rule of this.running) {
      const unreported = rule.unreported(this.rates);
      if (unreported === undefined) continue;
      for (const run of this.weights) {
        for (let i = run.start; i < run.stop; i++) moved[i] = moved[i]! - unreported[i]!;
      }
    }
    return moved;
  }

  /** Return the rules' buffers to keep or to send, by name. */
  state(): Vectors {
    return Object.assign({}, ...this.running.map((rule) => rule.state())) as Vectors;
  }
}

/** Find weights and statistics of the trained layers in the suffix that begins with a layer; neighbours are one run. */
export function runs(space: ParameterSpace, firstLayer: number, covered: Coverage): { weights: Slice[]; statistics: Slice[] } {
  const found = { weight: [] as Slice[], statistic: [] as Slice[] };
  const origin = space.suffix(firstLayer).start;
  space.layers.slice(firstLayer).forEach((layer, place) => {
    for (const parameter of covered.trains(firstLayer + place) ? layer : []) {
      const where = space.sliceOf(parameter.name);
      const [start, stop] = [where.start - origin, where.stop - origin];
      const same = found[parameter.kind];
      const last = same.at(-1);
      if (last?.stop === start) same[same.length - 1] = { start: last.start, stop };
      else if (start < stop) same.push({ start, stop });
    }
  });
  return { weights: found.weight, statistics: found.statistic };
}
