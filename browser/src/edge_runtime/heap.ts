/** How much memory the runtime has: its wasm heap grows and never shrinks, so its size is its peak. */

let heap: WebAssembly.Memory | undefined;

/** Watch the memory that the runtime makes; before it is loaded. */
export function watchHeap(): void {
  const Plain = WebAssembly.Memory;
  WebAssembly.Memory = class extends Plain {
    constructor(descriptor: WebAssembly.MemoryDescriptor) {
      super(descriptor);
      if ((descriptor.maximum ?? 0) > 1) heap = this;
    }
  };
}

/** Bytes of the heap; 0 before the runtime is loaded. */
export function heapBytes(): number {
  return heap?.buffer.byteLength ?? 0;
}
