/** FedProx: g ← g + μ(x − x_0). Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020. */
import type { Vector } from "../space.ts";
import { LocalRule, Running, type Start } from "./rule.ts";

const { fround } = Math;

export class Proximal extends LocalRule {
  constructor(readonly mu: number) {
    super();
  }

  begin(start: Start): Running {
    return this.mu ? new Pulling(fround(this.mu), start.origin) : new Running();
  }
}

class Pulling extends Running {
  constructor(
    private readonly mu: number,
    private readonly received: Vector,
  ) {
    super();
  }

  override direct(start: number, stop: number, g: Vector, x: Vector): void {
    for (let i = start; i < stop; i++) g[i] = g[i]! + fround(fround(x[i]! - this.received[i]!) * this.mu);
  }
}
