/** The graphics processor, where the browser lets a page compute on it. */

interface Adapter {
  readonly info: { readonly vendor: string; readonly architecture: string; readonly description: string; readonly isFallbackAdapter?: boolean };
}

/** The name of the adapter; undefined where there is none, or where the runtime that uses it could not run. */
export async function adapterName(): Promise<string | undefined> {
  if (!("Suspending" in WebAssembly)) return undefined; // that runtime waits for the adapter inside of WebAssembly
  const gpu = (navigator as { gpu?: { requestAdapter(): Promise<Adapter | null> } }).gpu;
  const info = (await gpu?.requestAdapter().catch(() => null))?.info;
  return info && ([info.vendor, info.architecture, info.description].filter(Boolean).join(" ") || "unnamed");
}
