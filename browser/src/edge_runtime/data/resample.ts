/**
 * Resize pictures as Pillow's BILINEAR does: a triangle filter in fixed point, to the last bit along one axis.
 *
 * Of two axes rows come first here; versions of Pillow differ in that, and so by one level of brightness.
 */

const PRECISION = 32 - 8 - 2;

interface Window {
  readonly first: number;
  readonly weights: Int32Array;
}

/** Resize interleaved bytes, H×W×C. */
export function resize(pixels: Uint8Array, height: number, width: number, toHeight: number, toWidth: number): Uint8Array {
  const channels = pixels.length / (height * width);
  const wide = width === toWidth ? pixels : along(pixels, windows(width, toWidth), height, width * channels, channels, channels);
  return height === toHeight
    ? wide
    : along(wide, windows(height, toHeight), 1, height * toWidth * channels, toWidth * channels, toWidth * channels);
}

/** Filter lines of `span` elements: outputs stand `step` apart, and so do the inputs of each. */
function along(from: Uint8Array, filter: readonly Window[], lines: number, span: number, step: number, width: number): Uint8Array {
  const found = new Uint8Array(lines * filter.length * width);
  for (let line = 0; line < lines; line++) {
    filter.forEach(({ first, weights }, place) => {
      for (let column = 0; column < width; column++) {
        let sum = 1 << (PRECISION - 1);
        const at = line * span + first * step + column;
        for (let i = 0; i < weights.length; i++) sum += from[at + i * step]! * weights[i]!;
        found[(line * filter.length + place) * width + column] = Math.max(0, Math.min(255, sum >> PRECISION));
      }
    });
  }
  return found;
}

function windows(size: number, wanted: number): Window[] {
  const scale = size / wanted;
  const support = Math.max(scale, 1);
  return Array.from({ length: wanted }, (_, place) => {
    const centre = (place + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - support + 0.5));
    const end = Math.min(size, Math.trunc(centre + support + 0.5));
    const raw = Array.from({ length: end - first }, (_, i) => Math.max(0, 1 - Math.abs((i + first - centre + 0.5) / support)));
    const total = raw.reduce((sum, weight) => sum + weight, 0);
    const fixed = raw.map((weight) => Math.trunc(0.5 + (weight / total) * (1 << PRECISION)));
    return { first, weights: Int32Array.from(fixed) };
  });
}
