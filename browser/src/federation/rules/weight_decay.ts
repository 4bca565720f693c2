/** Weight decay, as a gradient: g ← g + factor·x. A factor of 0 is plain SGD. */
import type { Vector } from "../space.ts";
import { LocalRule, Running } from "./rule.ts";

const { fround } = Math;

export class WeightDecay extends LocalRule {
  constructor(readonly factor: number) {
    super();
  }

  begin(): Running {
    return this.factor ? new Decaying(fround(this.factor)) : new Running();
  }
}

class Decaying extends Running {
  constructor(private readonly factor: number) {
    super();
  }

  override direct(start: number, stop: number, g: Vector, x: Vector): void {
    for (let i = start; i < stop; i++) g[i] = g[i]! + fround(x[i]! * this.factor);
  }
}
