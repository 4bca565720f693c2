/** Random changes of images during training: shifted (pad and crop) and mirrored, each sample in its own way. */
import { InputError } from "../../federation/errors.ts";
import type { Vector } from "../../federation/space.ts";
import { below, sampleBits } from "./prng.ts";

const TOP = 0; // the draws of one sample
const LEFT = 1;
const FLIP = 2;

export interface Augmentation {
  readonly crop: number; // pad by so many zero pixels on every side, crop back at a random place
  readonly flip: boolean; // mirror left and right with probability 1/2
}

/** Change every sample of a batch (N×C×H×W); the argument stays as it is. */
export function augment(
  { crop, flip }: Augmentation,
  batch: Vector,
  shape: readonly number[],
  indices: Int32Array,
  seed: number,
  epoch: number,
): Vector {
  if (crop === 0 && !flip) return batch;
  if (shape.length !== 3) throw new InputError(`augmentation is for images of shape C×H×W, the model takes ${shape.join("×")}`);
  const [channels, height, width] = shape as [number, number, number];
  if (crop >= Math.min(height, width)) {
    throw new InputError(`augmentation crop=${crop} can push an image of ${height}×${width} out of sight`);
  }
  const found = new Float32Array(batch.length);
  indices.forEach((index, sample) => {
    const down = crop ? below(sampleBits(seed, epoch, index, TOP), 2 * crop + 1) - crop : 0;
    const right = crop ? below(sampleBits(seed, epoch, index, LEFT), 2 * crop + 1) - crop : 0;
    const mirrored = flip && sampleBits(seed, epoch, index, FLIP) >> 63n === 1n;
    for (let plane = sample * channels; plane < (sample + 1) * channels; plane++) {
      for (let row = Math.max(0, -down); row < Math.min(height, height - down); row++) {
        for (let column = Math.max(0, -right); column < Math.min(width, width - right); column++) {
          const to = mirrored ? width - 1 - column : column;
          const from = (plane * height + row + down) * width + column + right;
          found[(plane * height + row) * width + to] = batch[from]!;
        }
      }
    }
  });
  return found;
}
