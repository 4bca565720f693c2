/**
 * Ordered dropout: every step trains the first channels of each layer, of a width that is drawn for this step (FjORD).
 *
 * What a step leaves out has a gradient of zero there, and its statistics stay.
 */
import { box } from "../federation/region.ts";
import type { Boundary, Manifest } from "../federation/manifest.ts";
import type { Vector } from "../federation/space.ts";
import { below, sampleBits } from "./data/prng.ts";
import type { Batch, GradientStep } from "./step.ts";

const WIDTH = 2 ** 33; // a draw of its own: neither dropout's nor one of the augmentation's

/** Steps of several widths as one over the widest: the others read its parameters and write to its gradients. */
export class OrderedDropoutStep implements GradientStep {
  readonly parameters: Vector;
  readonly gradients: Vector;
  private readonly corners;
  private readonly statistics;

  constructor(
    manifest: Manifest,
    boundaries: readonly Boundary[],
    private readonly steps: readonly GradientStep[],
  ) {
    const widest = manifest.spaceOf(boundaries[0]!);
    this.parameters = steps[0]!.parameters;
    this.gradients = steps[0]!.gradients;
    this.corners = boundaries.map((boundary) => (boundary.narrow ? box(widest, boundary.narrow) : undefined));
    this.statistics = box(widest, widest.layers.map((layer) => layer.map((p) => p.shape))).only("statistic");
  }

  async run(batch: Batch, seed: number): Promise<number> {
    const drawn = below(sampleBits(seed, 0, 0, WIDTH), this.steps.length);
    const step = this.steps[drawn]!;
    if (drawn === 0) return step.run(batch, seed);
    const corner = this.corners[drawn]!;
    step.parameters.set(corner.gather(this.parameters));
    const loss = await step.run(batch, seed);
    this.gradients.fill(0);
    this.statistics.scatter(this.statistics.gather(this.parameters), this.gradients);
    corner.scatter(step.gradients, this.gradients);
    return loss;
  }

  async release(): Promise<void> {
    for (const step of this.steps) await step.release();
  }
}
