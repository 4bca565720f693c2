/** The loss over the rounds that this device helped with: lower is better. */
import type { DoneRound } from "../edge_runtime/storage.ts";

const [WIDTH, HEIGHT, EDGE] = [320, 80, 4];

export function LossCurve({ rounds }: { readonly rounds: readonly DoneRound[] }) {
  const points = rounds.filter((each): each is DoneRound & { loss: number } => each.loss !== null && Number.isFinite(each.loss));
  const [first, last] = [points[0], points.at(-1)];
  if (first === undefined || last === undefined) return null;
  const losses = points.map(({ loss }) => loss);
  const [least, most] = [Math.min(...losses), Math.max(...losses)];
  const x = (round: number): number => EDGE + ((WIDTH - 2 * EDGE) * (round - first.round)) / Math.max(1, last.round - first.round);
  const y = (loss: number): number => EDGE + ((HEIGHT - 2 * EDGE) * (most - loss)) / (most - least || 1);
  const line = points.map(({ round, loss }) => `${x(round).toFixed(1)},${y(loss).toFixed(1)}`).join(" ");
  const words = `Loss ${first.loss.toFixed(3)} in round ${first.round + 1}, ${last.loss.toFixed(3)} in round ${last.round + 1}`;
  return (
    <figure>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={words}>
        <polyline points={line} />
        <circle cx={x(last.round)} cy={y(last.loss)} r={EDGE} />
      </svg>
      <figcaption class="quiet">{words}. Lower is better.</figcaption>
    </figure>
  );
}
