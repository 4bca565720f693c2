/** The layers of a model from input to output: those that this device trains are filled. */
const MOST = 80; // that can be told apart on a phone

interface Props {
  readonly layers: number;
  readonly trained: number; // the last ones
}

export function LayerBar({ layers, trained }: Props) {
  const shown = Math.min(layers, MOST);
  const first = shown - Math.round((trained / layers) * shown);
  return (
    <div class="layers" role="img" aria-label={`${trained} of ${layers} layers are trained here, those next to the output`}>
      {Array.from({ length: shown }, (_, place) => (
        <i key={place} class={place >= first ? "trained" : ""} />
      ))}
    </div>
  );
}
