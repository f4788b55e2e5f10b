// Threads of two blocks write different bytes of the same words.
//
// launch: grid=2, block=32
// options: global_races=True
// arg: np.zeros(16, np.uint32)
// result: np.full(16, 0x02010201)
extern "C" __global__ void bytes_of_a_word(unsigned* words) {
  unsigned char* bytes = reinterpret_cast<unsigned char*>(words);
  bytes[threadIdx.x * 2 + blockIdx.x] = blockIdx.x + 1;
}
