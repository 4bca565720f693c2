/** Random choices that are the same as the Python agent's: the sorting of Philox's bits, and SplitMix64's hash. */

const MASK = (1n << 64n) - 1n;
const GOLDEN = 0x9e3779b97f4a7c15n;
const MULTIPLIERS = [0xd2e7470ee14c6c93n, 0xca5a826395121157n] as const;
const WEYL = [GOLDEN, 0xbb67ae8584caa73bn] as const;
const ROUNDS = 10;

/** Shuffle the numbers from 0 to n - 1; the order depends on the seed and the epoch. */
export function shuffled(n: number, seed: number, epoch: number): Int32Array {
  const words = new Uint32Array(philox(n, BigInt(seed) & MASK, BigInt(epoch) & MASK).buffer);
  const order = Int32Array.from({ length: n }, (_, number) => number);
  return order.sort((a, b) => words[2 * a + 1]! - words[2 * b + 1]! || words[2 * a]! - words[2 * b]! || a - b);
}

/** Draw 64 random bits for a sample: the hash of (seed, epoch, sample, draw), whatever else is in the batch. */
export function sampleBits(seed: number, epoch: number, index: number, draw: number): bigint {
  let prefix = 0n;
  for (const number of [seed, epoch, draw]) prefix = mix((prefix + BigInt(number) + GOLDEN) & MASK);
  return mix(((BigInt(index) + 1n) * GOLDEN + prefix) & MASK);
}

/** Turn random bits into equally likely numbers from 0 to limit - 1; `limit` is far below 2^32. */
export function below(bits: bigint, limit: number): number {
  return Number(((bits >> 32n) * BigInt(limit)) >> 32n);
}

function mix(z: bigint): bigint {
  z = ((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  z = ((z ^ (z >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return z ^ (z >> 31n);
}

/** Philox 4×64 with ten rounds, as numpy's: the counter is raised before each block of four. */
function philox(n: number, key0: bigint, key1: bigint): BigUint64Array<ArrayBuffer> {
  const found = new BigUint64Array(n);
  for (let block = 0; 4 * block < n; block++) {
    let [c0, c1, c2, c3] = [BigInt(block + 1), 0n, 0n, 0n];
    let [k0, k1] = [key0, key1];
    for (let round = 0; round < ROUNDS; round++) {
      const [p0, p1] = [MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2];
      [c0, c1, c2, c3] = [(p1 >> 64n) ^ c1 ^ k0, p1 & MASK, (p0 >> 64n) ^ c3 ^ k1, p0 & MASK];
      [k0, k1] = [(k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK];
    }
    found.set([c0, c1, c2, c3].slice(0, n - 4 * block), 4 * block);
  }
  return found;
}
