/**
 * onnxruntime's own module, and a hold on the instance that it makes: onnxruntime-web keeps that to itself, and its memory is where
 * parameters live. Not bundled: onnxruntime-web imports it by its address, which names the module to hold: ?of=ADDRESS.
 */
export default async function make(config) {
  const { default: factory } = await import(/* @vite-ignore */ new URL(import.meta.url).searchParams.get("of"));
  return (globalThis[Symbol.for("embrace runtime")] = await factory(config));
}
