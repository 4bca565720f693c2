/**
 * A training step on the graphics processor. It has to earn its place: a graph's first batch runs there and on WebAssembly, and only
 * where both agree and the graphics processor is the faster one does it go on there. If it fails later, WebAssembly takes over.
 */
import { EmbraceError, messageOf } from "../federation/errors.ts";
import type { TensorSpec } from "../federation/manifest.ts";
import type { Bytes, ParameterSpace, Vector } from "../federation/space.ts";
import { runtime } from "./runtime.ts";
import { TrainingStep, type Batch, type GradientStep } from "./step.ts";

const LOSS_TOLERANCE = 1e-4; // of the loss
const GRADIENT_TOLERANCE = 1e-3; // of the gradients' length: single ReLUs at their kink may switch

export type Note = (text: string) => void;

/** Open the step of a graph, where this device runs it best. */
export async function openStep(graph: Bytes, space: ParameterSpace, firstLayer: number, entry: TensorSpec, labels: TensorSpec, note: Note): Promise<GradientStep> {
  const wasm = await TrainingStep.open(graph, space, firstLayer, entry, labels);
  if (!runtime().hasGpu) return wasm;
  try {
    return new GpuStep(wasm, await TrainingStep.open(graph, space, firstLayer, entry, labels, { provider: "webgpu", vectors: wasm }), note);
  } catch (error) {
    note(`WebGPU does not run this model, so WebAssembly does: ${messageOf(error)}`);
    return wasm;
  }
}

/** Two steps that share their vectors, and the choice between them. */
export class GpuStep implements GradientStep {
  readonly parameters: Vector;
  readonly gradients: Vector;
  private chosen: GradientStep | undefined;

  constructor(
    private readonly wasm: GradientStep,
    private readonly gpu: GradientStep,
    private readonly note: Note,
    private readonly now: () => number = () => performance.now(),
  ) {
    this.parameters = wasm.parameters;
    this.gradients = wasm.gradients;
  }

  async run(batch: Batch, seed: number): Promise<number> {
    if (this.chosen === undefined) return this.choose(batch, seed);
    if (this.chosen === this.wasm) return this.wasm.run(batch, seed);
    try {
      return await this.gpu.run(batch, seed);
    } catch (error) {
      return this.goBack(`WebGPU failed, and WebAssembly goes on: ${messageOf(error)}`, batch, seed);
    }
  }

  async release(): Promise<void> {
    await this.gpu.release().catch(() => {}); // it may be lost already
    await this.wasm.release();
  }

  /** Run a batch twice on both: once to compare and to compile, once to time. */
  private async choose(batch: Batch, seed: number): Promise<number> {
    const expected = await this.wasm.run(batch, seed);
    const right = this.gradients.slice();
    try {
      const found = await this.gpu.run(batch, seed);
      checkSame(found, expected, this.gradients, right);
      const [gpu, wasm] = [await this.time(this.gpu, batch, seed), await this.time(this.wasm, batch, seed)];
      const figures = `${gpu.toFixed(0)} ms a step, and WebAssembly ${wasm.toFixed(0)} ms`;
      if (gpu > wasm) return this.goBack(`WebGPU takes ${figures}, so WebAssembly trains`, batch, seed);
      this.chosen = this.gpu;
      this.note(`WebGPU trains: it takes ${figures}`);
      return expected;
    } catch (error) {
      return this.goBack(`WebGPU is not used: ${messageOf(error)}`, batch, seed);
    }
  }

  private async time(step: GradientStep, batch: Batch, seed: number): Promise<number> {
    const began = this.now();
    await step.run(batch, seed);
    return this.now() - began;
  }

  private goBack(why: string, batch: Batch, seed: number): Promise<number> {
    this.chosen = this.wasm;
    this.note(why);
    return this.wasm.run(batch, seed);
  }
}

function checkSame(loss: number, rightLoss: number, gradients: Vector, right: Vector): void {
  const length = Math.sqrt(right.reduce((sum, value) => sum + value ** 2, 0));
  const distance = Math.sqrt(right.reduce((sum, value, at) => sum + (gradients[at]! - value) ** 2, 0));
  if (!(Math.abs(loss - rightLoss) <= LOSS_TOLERANCE * Math.max(1, Math.abs(rightLoss))) || !(distance <= GRADIENT_TOLERANCE * length)) {
    throw new EmbraceError(`its first step differs from WebAssembly's: loss ${loss} and ${rightLoss}, gradients by ${distance} of ${length}`);
  }
}
