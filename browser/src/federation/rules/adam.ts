/** Adam and AdamW, as PyTorch's: federation/axes/local/adam.py. The moments are reset or kept between two rounds. */
import type { DeviceTask, Handover, LocalModel, LocalResult, Vectors } from "../device_task.ts";
import type { Vector } from "../space.ts";
import { LocalRule, Running, type Start } from "./rule.ts";

const { fround } = Math;
const FIRST = "first_moment";
const SECOND = "second_moment";

export class Adam extends LocalRule {
  constructor(
    readonly beta1: number,
    readonly beta2: number,
    readonly epsilon: number,
    readonly between: "reset" | "keep",
    readonly decay = 0, // AdamW: added to the direction, where no moment knows it
  ) {
    super();
  }

  override get buffers(): number {
    return 2;
  }

  begin(start: Start): Running {
    const [first, second] = [start.brought[FIRST], start.brought[SECOND]];
    const { length } = start.x;
    if (first === undefined || second === undefined) return new Moments(this, new Float32Array(length), new Float32Array(length), 0);
    return new Moments(this, first.slice(), second.slice(), start.stepsBefore);
  }

  override async beginTask(task: DeviceTask, _model: LocalModel): Promise<Vectors> {
    const kept = this.between === "keep" ? task.own?.vectors : undefined;
    const [first, second] = [kept?.[FIRST], kept?.[SECOND]];
    return first === undefined || second === undefined ? {} : { [FIRST]: first, [SECOND]: second };
  }

  override finishTask(_task: DeviceTask, result: LocalResult): Handover {
    if (this.between === "reset") return {};
    return { kept: { [FIRST]: result.state[FIRST]!, [SECOND]: result.state[SECOND]! } };
  }
}

class Moments extends Running {
  private rest: readonly [number, number] = [1, 1];

  constructor(
    private readonly rule: Adam,
    private readonly first: Vector,
    private readonly second: Vector,
    private steps: number,
  ) {
    super();
  }

  override beginStep(): void {
    const { beta1, beta2 } = this.rule;
    this.steps += 1;
    this.rest = [fround(1 - beta1 ** this.steps), fround(Math.sqrt(1 - beta2 ** this.steps))];
  }

  override direct(start: number, stop: number, g: Vector, x: Vector): void {
    const { first: m, second: v, rule } = this;
    const [beta1, beta2, epsilon, decay] = [rule.beta1, rule.beta2, rule.epsilon, rule.decay].map(fround) as [number, number, number, number];
    const [new1, new2] = [fround(1 - rule.beta1), fround(1 - rule.beta2)];
    const [rest1, rest2] = this.rest;
    for (let i = start; i < stop; i++) {
      const gradient = g[i]!;
      const mean = fround(fround(m[i]! * beta1) + fround(gradient * new1));
      const square = fround(fround(v[i]! * beta2) + fround(fround(gradient * gradient) * new2));
      m[i] = mean;
      v[i] = square;
      const size = fround(fround(fround(Math.sqrt(square)) / rest2) + epsilon);
      const direction = fround(fround(mean / size) / rest1);
      g[i] = decay ? direction + fround(x[i]! * decay) : direction;
    }
  }

  override state(): Vectors {
    return { [FIRST]: this.first, [SECOND]: this.second };
  }
}
