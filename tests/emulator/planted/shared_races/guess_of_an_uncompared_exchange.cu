// A linked list in shared memory: its head is read, then exchanged, and the exchanged value is ignored.
//
// launch: grid=1, block=64
// arg: np.zeros(64, np.int32)
// report: race: (read|atomic) of 4 bytes at byte 0 of the static shared memory
extern "C" __global__ void guess_of_an_uncompared_exchange(int* links) {
  __shared__ int head;
  if (threadIdx.x == 0) head = -1;
  __syncthreads();
#if BROKEN
  links[threadIdx.x] = head;  // <- reported
  atomicExch(&head, threadIdx.x);  // <- reported
#else
  int old = head, assumed;
  do {
    assumed = old;
    links[threadIdx.x] = assumed;
    old = atomicCAS(&head, assumed, threadIdx.x);
  } while (assumed != old);
#endif
}
