/** The graphics processor has to earn its place: same numbers, sooner. */
import { expect, test } from "vitest";

import { GpuStep } from "../src/edge_runtime/gpu_step.ts";
import type { Batch, GradientStep, Vectors } from "../src/edge_runtime/step.ts";

const BATCH: Batch = { size: 1, inputs: new Float32Array(1), labels: new Float32Array(1) };
const RIGHT = Float32Array.of(1, -2, 3);

class Fake implements GradientStep {
  runs = 0;
  released = 0;

  constructor(
    private readonly vectors: Vectors,
    private readonly clock: { now: number },
    private readonly takes: number,
    private readonly makes: (run: number) => { loss: number; gradients: ArrayLike<number> } = () => ({ loss: 2, gradients: RIGHT }),
  ) {}

  get parameters(): Vectors["parameters"] {
    return this.vectors.parameters;
  }

  get gradients(): Vectors["gradients"] {
    return this.vectors.gradients;
  }

  async run(): Promise<number> {
    const { loss, gradients } = this.makes(this.runs++);
    this.gradients.set(gradients);
    this.clock.now += this.takes;
    return loss;
  }

  async release(): Promise<void> {
    this.released++;
  }
}

function both(takes: number, makes?: ConstructorParameters<typeof Fake>[3]) {
  const clock = { now: 0 };
  const vectors = { parameters: new Float32Array(3), gradients: new Float32Array(3) };
  const notes: string[] = [];
  const [wasm, gpu] = [new Fake(vectors, clock, 10), new Fake(vectors, clock, takes, makes)];
  return { step: new GpuStep(wasm, gpu, (text) => notes.push(text), () => clock.now), wasm, gpu, notes };
}

test("it goes on where it is faster and gives the same", async () => {
  const { step, wasm, gpu, notes } = both(2, () => ({ loss: 2 + 1e-6, gradients: RIGHT.map((value) => value + 1e-5) }));
  expect(await step.run(BATCH, 1)).toBe(2);
  expect([...step.gradients]).toEqual([...RIGHT]);
  expect(notes).toEqual(["WebGPU trains: it takes 2 ms a step, and WebAssembly 10 ms"]);
  const before = wasm.runs;
  expect(await step.run(BATCH, 1)).toBe(2 + 1e-6);
  expect([wasm.runs, gpu.runs]).toEqual([before, 3]);
});

test.each<[string, number, ConstructorParameters<typeof Fake>[3], RegExp]>([
  ["slower", 20, undefined, /takes 20 ms a step, and WebAssembly 10 ms, so WebAssembly trains/],
  ["another loss", 2, () => ({ loss: 2.01, gradients: RIGHT }), /first step differs/],
  ["other gradients", 2, () => ({ loss: 2, gradients: [1, -2, 3.1] }), /first step differs/],
  ["no numbers", 2, () => ({ loss: NaN, gradients: [NaN, NaN, NaN] }), /first step differs/],
  ["a failure", 2, () => { throw new Error("device lost"); }, /not used: device lost/],
])("it is left where it gives %s", async (_, takes, makes, why) => {
  const { step, gpu, notes } = both(takes, makes);
  expect(await step.run(BATCH, 1)).toBe(2);
  expect([...step.gradients]).toEqual([...RIGHT]);
  expect(notes).toEqual([expect.stringMatching(why)]);
  const before = gpu.runs;
  expect(await step.run(BATCH, 1)).toBe(2);
  expect(gpu.runs).toBe(before);
});

test("if it fails later, the step is repeated on WebAssembly", async () => {
  const { step, wasm, gpu, notes } = both(2, (run) => {
    if (run === 2) throw new Error("device lost");
    return { loss: 2, gradients: RIGHT };
  });
  await step.run(BATCH, 1);
  step.gradients.fill(0);
  expect(await step.run(BATCH, 1)).toBe(2);
  expect([...step.gradients]).toEqual([...RIGHT]);
  expect(notes.at(-1)).toBe("WebGPU failed, and WebAssembly goes on: device lost");
  await step.release();
  expect([wasm.released, gpu.released]).toEqual([1, 1]);
});
