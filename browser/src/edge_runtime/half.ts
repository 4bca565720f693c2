/** float16 and back, as numpy rounds: to the nearest, ties to even; what is too large becomes the largest. */

const bits = new Uint32Array(1);
const single = new Float32Array(bits.buffer);

export function toHalf(value: number): number {
  single[0] = Math.max(-65504, Math.min(65504, value)); // infinity would be worse than the edge
  const word = bits[0]!;
  const sign = (word >>> 16) & 0x8000;
  const exponent = ((word >>> 23) & 0xff) - 112;
  if (exponent >= 0x8f) return sign | 0x7e00; // not a number: the exponent is all ones
  const mantissa = word & 0x7fffff;
  if (exponent > 0) return sign | rounded((exponent << 23) | mantissa, 13);
  return exponent < -10 ? sign : sign | rounded(mantissa | 0x800000, 14 - exponent);
}

export function fromHalf(half: number): number {
  const exponent = (half >>> 10) & 0x1f;
  const mantissa = half & 0x3ff;
  const magnitude =
    exponent === 0 ? mantissa * 2 ** -24 : exponent === 31 ? (mantissa ? NaN : Infinity) : (1024 + mantissa) * 2 ** (exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

/** Shift right and round to the nearest, ties to even. */
function rounded(value: number, shift: number): number {
  const rest = value & ((1 << shift) - 1);
  const half = 1 << (shift - 1);
  const found = value >>> shift;
  return rest > half || (rest === half && found & 1) ? found + 1 : found;
}
