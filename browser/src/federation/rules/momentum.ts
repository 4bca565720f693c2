/** Heavy ball: v ← factor·v + g, and the step goes along v; with Nesterov along g + factor·v. As PyTorch's SGD. */
import type { DeviceTask, Handover, LocalModel, LocalResult, Vectors } from "../device_task.ts";
import type { Vector } from "../space.ts";
import { LocalRule, Running, type Start } from "./rule.ts";

const { fround } = Math;
const MOMENTUM = "momentum"; // v: brought, kept, sent, and the server's mean of it

export class Momentum extends LocalRule {
  constructor(
    readonly factor: number,
    readonly nesterov: boolean,
    readonly between: "reset" | "keep" | "average", // what becomes of it between two rounds
  ) {
    super();
  }

  override get buffers(): number {
    return 1;
  }

  begin(start: Start): Running {
    const velocity = start.brought[MOMENTUM]?.slice() ?? new Float32Array(start.x.length);
    return new (this.nesterov ? Nesterov : HeavyBall)(fround(this.factor), velocity);
  }

  override async beginTask(task: DeviceTask, _model: LocalModel): Promise<Vectors> {
    if (this.between === "average") {
      if (!task.goesOn(MOMENTUM)) return { [MOMENTUM]: await task.server.state(MOMENTUM, task.everything) };
      const newer: Vector[] = [];
      for (const part of task.fresh) newer.push(await task.server.state(MOMENTUM, part));
      return { [MOMENTUM]: task.renewed(MOMENTUM, newer) };
    }
    const kept = this.between === "keep" ? task.own?.vectors[MOMENTUM] : undefined;
    return kept === undefined ? {} : { [MOMENTUM]: kept };
  }

  override finishTask(task: DeviceTask, result: LocalResult): Handover {
    if (this.between === "reset") return {};
    const velocity = { [MOMENTUM]: result.state[MOMENTUM]! };
    const stays = this.between === "keep" || task.exchange.keepsModel;
    return { tracks: this.between === "average" ? velocity : {}, kept: stays ? velocity : {} };
  }
}

class HeavyBall extends Running {
  constructor(
    protected readonly factor: number,
    protected readonly velocity: Vector,
  ) {
    super();
  }

  override direct(start: number, stop: number, g: Vector, _x: Vector): void {
    const v = this.velocity;
    for (let i = start; i < stop; i++) v[i] = g[i] = g[i]! + fround(v[i]! * this.factor);
  }

  override state(): Vectors {
    return { [MOMENTUM]: this.velocity };
  }
}

class Nesterov extends HeavyBall {
  override direct(start: number, stop: number, g: Vector, _x: Vector): void {
    const v = this.velocity;
    for (let i = start; i < stop; i++) {
      const moved = fround(fround(v[i]! * this.factor) + g[i]!);
      v[i] = moved;
      g[i] = g[i]! + fround(moved * this.factor);
    }
  }
}
