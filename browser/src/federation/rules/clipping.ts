/** Clip a step's gradient by its norm, before any rule sees it: federation/axes/local/clipping.py. */
import type { Slice, Vector } from "../space.ts";

const TINY = 1e-6; // PyTorch's: a norm of zero divides nothing

/** Shorten the gradient of the weights to the length `most`, in place; a shorter one stays as it is. */
export function clip(gradients: Vector, weights: readonly Slice[], most: number): void {
  let squares = 0;
  for (const { start, stop } of weights) for (let i = start; i < stop; i++) squares += gradients[i]! * gradients[i]!;
  const norm = Math.sqrt(squares);
  const factor = Math.fround(Math.min(1, most / (norm + TINY)));
  if (!Number.isFinite(norm) || factor >= 1) return; // the trainer reports what is not finite
  for (const { start, stop } of weights) for (let i = start; i < stop; i++) gradients[i] = gradients[i]! * factor;
}
