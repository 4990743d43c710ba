// The grouped product of `wgmma.py`, which says what it computes and puts the names in capitals in front.
//
// A tile is 256 weight rows of one expert times up to ROWS of its tokens. Two groups of four warps multiply, each 128
// weight rows: FP4 codes become E4M3 in registers and stand on the left of the tensor cores' product; token rows lie in
// shared memory and stand on the right. A third group of warps fetches. Blocks walk over tiles, an expert's together.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEV __device__ __forceinline__
static constexpr int COLUMNS = 256;    // weight rows of a tile
static constexpr int CONSUMERS = 256;  // threads that multiply
static constexpr int STEPS = WIDTH / 128;
static constexpr int SORTED = 16;  // slots of an expert begin at a multiple of this

struct Args {
  const u8 *x;            // E4M3 [source rows, WIDTH]
  const float *x_scale;   // [source rows]
  const u8 *w;            // [experts, WIDTH / 64, OUT * 32]
  const u8 *w_scale;      // [experts, WIDTH / 32, OUT]
  const float *residual;  // [experts]
  const int *slots;       // by expert; slot / divisor is the source row
  const int *layout;      // [experts + 1], without padding
  u16 *out;               // BF16 [slots, OUT]
  int experts, divisor;
};

struct Shared {
  alignas(1024) u8 x[STAGES][ROWS * 128];
  alignas(128) u8 w[STAGES][COLUMNS * 64];
  u8 w_scale[STAGES][COLUMNS * 4];
  alignas(16) u8 scratch[8][512];
  int slot[2][ROWS];
  u32 from[2][ROWS];
  float row_scale[2][ROWS];
  int first_block[MOST_EXPERTS + 1];
  int first_slot[MOST_EXPERTS];
  alignas(8) u64 full[STAGES];
  u64 empty[STAGES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "wgmma.py counts the shared memory");

DEV u32 address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEV void barrier_init(u64 *b, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(b)), "r"(count));
}
DEV void arrive(u64 *b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address(b)) : "memory"); }
DEV void arrive_expect(u64 *b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(b)), "r"(bytes) : "memory");
}
DEV void wait(u64 *b, u32 parity) {
  asm volatile(
      "{ .reg .pred P;\n"
      "AGAIN: mbarrier.try_wait.parity.shared.b64 P, [%0], %1;\n"
      "@P bra DONE;\n"
      "bra AGAIN;\n"
      "DONE: }" ::"r"(address(b)), "r"(parity) : "memory");
}
DEV void copy16(u32 to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEV void copy_bulk(u32 to, const void *from, int bytes, u64 *b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(address(b)) : "memory");
}
// The barrier takes this thread's arrival when its copies so far have landed. Nobody waits for them here: a fence in the
// thread that copies would wait for all it has asked for, a latency per step.
DEV void arrive_with_copies(u64 *b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address(b)) : "memory");
}
// A full stage: what ordinary copies wrote becomes visible to the tensor cores.
DEV void wait_full(u64 *b, u32 parity) {
  wait(b, parity);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
template <int PENDING> DEV void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
DEV u32 permute(u32 a, u32 b, u32 select) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(select));
  return r;
}
// The sign bits of w over four magnitudes.
DEV u32 with_signs(u32 w, u32 magnitude) {
  u32 r;
  asm("lop3.b32 %0, %1, 0x80808080, %2, 0xEA;" : "=r"(r) : "r"(w), "r"(magnitude));
  return r;
}
DEV u32 two_bf16(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// Registers of a running product are not touched across this.
template <int N> DEV void pin(float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(v[i])::"memory");
}
DEV void pin(u32 (&v)[16]) {
#pragma unroll
  for (int i = 0; i < 16; i++) asm volatile("" : "+r"(v[i])::"memory");
}

template <int N> struct Mma;
//PRODUCTS//

// 16 weight rows x 128 as the left operands of four products over 32: a lane's 8 codes of one row and 32 columns are
// one word. The eight magnitudes times the group's power of two are a table of eight bytes in two registers.
DEV void unpack(u32 (&a)[16], const u8 *w, const u8 *scales, int tile, int lane) {
  const uint4 first = *reinterpret_cast<const uint4 *>(w + tile * 512 + lane * 16);
  const uint4 second = *reinterpret_cast<const uint4 *>(w + COLUMNS * 32 + tile * 512 + lane * 16);
  const u32 words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  const u8 *mine = scales + tile / 4 * 64 + lane / 4 * 8 + tile % 4 * 2;
#pragma unroll
  for (int step = 0; step < 4; step++) {
    const u32 both = *reinterpret_cast<const u16 *>(mine + step * COLUMNS);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 shift = half ? both >> 8 : both & 0xff;
      const u32 low = shift * 0x08080800u + 0x0C080000u, high = shift * 0x08080808u + 0x1C181410u;
      const u32 word = words[step * 2 + half], select = word & 0x77777777u;
      a[step * 4 + half] = with_signs(word << 4, permute(low, high, select));
      a[step * 4 + 2 + half] = with_signs(word, permute(low, high, select >> 16));
    }
  }
}

template <int N> DEV void multiply(float (&sum)[N / 2], u32 (&a)[16], u64 rows) {
  pin(sum), pin(a);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 4; i++) Mma<N>::run(sum, a[i * 4], a[i * 4 + 1], a[i * 4 + 2], a[i * 4 + 3], rows + i * 2);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

struct Tile {
  int expert, rows, base, column;
};

// Tiles are numbered by block of tokens, then by column; an expert's blocks share its tokens evenly.
DEV Tile tile_of(const Shared &s, const Args &p, int tile) {
  const int block = tile / TILES;
  int low = 0, high = p.experts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (s.first_block[middle] <= block) low = middle;
    else high = middle;
  }
  const int count = p.layout[low + 1] - p.layout[low], blocks = s.first_block[low + 1] - s.first_block[low];
  const int each = ((count + blocks - 1) / blocks + 7) / 8 * 8, first = (block - s.first_block[low]) * each;
  return {low, min(each, count - first), s.first_slot[low] + first, tile % TILES};
}

template <int N> DEV void consume(Shared &s, const Args &p, const Tile &t, int parity, u32 &it) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float sum0[N / 2], sum1[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; i++) sum0[i] = sum1[i] = 0.f;
  u32 a[16], b[16], stage = it % STAGES;
  wait_full(&s.full[stage], it / STAGES & 1);
  unpack(a, s.w[stage], s.w_scale[stage], warp * 2, lane);
#pragma unroll 1
  for (int k = 0; k < STEPS; k++) {
    // rows of 128 bytes, swizzled over 128 bytes, groups of 8 rows 1024 bytes apart
    const u64 rows = (u64)((address(s.x[stage]) & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
    const u32 old = stage;
    multiply<N>(sum0, a, rows);
    unpack(b, s.w[stage], s.w_scale[stage], warp * 2 + 1, lane);
    multiply<N>(sum1, b, rows);
    stage = ++it % STAGES;
    mma_wait<1>();
    pin(sum0), pin(a);
    if (k + 1 < STEPS) {  // the next step's first rows, while the second product of this one runs
      wait_full(&s.full[stage], it / STAGES & 1);
      unpack(a, s.w[stage], s.w_scale[stage], warp * 2, lane);
      pin(a);
    }
    mma_wait<0>();
    pin(sum1), pin(b);
    __syncwarp();
    if (lane == 0) arrive(&s.empty[old]);
  }
  const float factor = p.residual[t.expert] * 64.f;
  const u32 scratch = address(s.scratch[warp]);
  const int i = lane % 8, m = lane / 8, row = lane / 4, c = lane % 4;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {  // 8 tokens x the warp's 32 columns, turned round in shared memory
    const float2 f = *reinterpret_cast<const float2 *>(&s.row_scale[parity][j * 8 + c * 2]);
    const float even = f.x * factor, odd = f.y * factor;
    const u32 r0 = two_bf16(sum0[j * 4] * even, sum0[j * 4 + 1] * odd);
    const u32 r1 = two_bf16(sum0[j * 4 + 2] * even, sum0[j * 4 + 3] * odd);
    const u32 r2 = two_bf16(sum1[j * 4] * even, sum1[j * 4 + 1] * odd);
    const u32 r3 = two_bf16(sum1[j * 4 + 2] * even, sum1[j * 4 + 3] * odd);
    __syncwarp();
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     scratch + i * 64 + ((m ^ (i >> 1 & 3)) << 4)),
                 "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
    __syncwarp();
    const uint4 v = *reinterpret_cast<const uint4 *>(s.scratch[warp] + row * 64 + ((c ^ (row >> 1 & 3)) << 4));
    if (j * 8 + row < t.rows) {
      const u64 at = (u64)s.slot[parity][j * 8 + row] * (TILES * COLUMNS) + t.column * COLUMNS + warp * 32 + c * 8;
      *reinterpret_cast<uint4 *>(p.out + at) = v;
    }
  }
}

DEV void fetch(Shared &s, const Args &p, const Tile &t, int parity, u32 &it) {
  const int thread = threadIdx.x - CONSUMERS, pieces = (t.rows + 15) / 16;
  for (int row = thread; row < ROWS; row += 128)
    s.from[parity][row] = (u32)(p.slots[t.base + min(row, t.rows - 1)] / p.divisor);
  asm volatile("bar.sync 2, 128;" ::: "memory");
  const int first = thread / 8, chunk = thread % 8;
  u32 from[ROWS / 16];  // where this thread's pieces of rows come from, as long as the tile lasts
#pragma unroll
  for (int i = 0; i < ROWS / 16; i++) from[i] = s.from[parity][first + i * 16] * (u32)WIDTH + chunk * 16;
  const u32 swizzled = first * 128 + ((chunk ^ (first & 7)) << 4);
  const u64 out = TILES * COLUMNS;
  const u8 *w = p.w + (u64)t.expert * out * (WIDTH / 2) + (u64)t.column * COLUMNS * 32;
  const u8 *w_scale = p.w_scale + (u64)t.expert * out * (WIDTH / 32) + t.column * COLUMNS + thread % 16 * 16;
#pragma unroll 1
  for (int k = 0; k < STEPS; k++, it++) {
    const u32 stage = it % STAGES;
    wait(&s.empty[stage], (it / STAGES & 1) ^ 1);
    if (thread == 0) {
      arrive_expect(&s.full[stage], COLUMNS * 64);
      const u32 to = address(s.w[stage]);
      copy_bulk(to, w + (u64)(k * 2) * out * 32, COLUMNS * 32, &s.full[stage]);
      copy_bulk(to + COLUMNS * 32, w + (u64)(k * 2 + 1) * out * 32, COLUMNS * 32, &s.full[stage]);
    }
    const u32 to = address(s.x[stage]) + swizzled;
    const u8 *x = p.x + k * 128;
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++)
      if (i < pieces) copy16(to + i * 2048, x + from[i]);
    if (thread < 64) copy16(address(s.w_scale[stage]) + thread * 16, w_scale + (u64)(k * 4 + thread / 16) * out);
    arrive_with_copies(&s.full[stage]);
  }
}

extern "C" __global__ void __launch_bounds__(384, 1) v4mesh_experts(const __grid_constant__ Args p) {
  extern __shared__ __align__(1024) u8 raw[];
  Shared &s = *reinterpret_cast<Shared *>(raw);
  const int thread = threadIdx.x, lane = thread % 32;
  if (thread < 32) {  // where each expert's blocks and sorted slots begin
    int blocks = 0, slots = 0;
    for (int base = 0; base < p.experts; base += 32) {
      const int e = base + lane, count = e < p.experts ? p.layout[e + 1] - p.layout[e] : 0;
      const int own_blocks = (count + ROWS - 1) / ROWS, own_slots = (count + SORTED - 1) / SORTED * SORTED;
      int b = own_blocks, n = own_slots;
      for (int d = 1; d < 32; d *= 2) {
        const int other_b = __shfl_up_sync(0xffffffffu, b, d), other_n = __shfl_up_sync(0xffffffffu, n, d);
        if (lane >= d) b += other_b, n += other_n;
      }
      if (e < p.experts) s.first_block[e] = blocks + b - own_blocks, s.first_slot[e] = slots + n - own_slots;
      blocks += __shfl_sync(0xffffffffu, b, 31);
      slots += __shfl_sync(0xffffffffu, n, 31);
    }
    if (lane == 0) {
      s.first_block[p.experts] = blocks;
      for (int i = 0; i < STAGES; i++) barrier_init(&s.full[i], 129), barrier_init(&s.empty[i], 8);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
  }
  __syncthreads();
  const int total = s.first_block[p.experts] * TILES;
  u32 it = 0;
  int parity = 0;
  // 256 threads with 232 registers and 128 with 40 have as many as 384 with 168
  if (thread >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    for (int tile = blockIdx.x; tile < total; tile += gridDim.x, parity ^= 1) fetch(s, p, tile_of(s, p, tile), parity, it);
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    for (int tile = blockIdx.x; tile < total; tile += gridDim.x, parity ^= 1) {
      const Tile t = tile_of(s, p, tile);
      if (thread < t.rows) {
        const int slot = p.slots[t.base + thread];
        s.slot[parity][thread] = slot;
        s.row_scale[parity][thread] = p.x_scale[slot / p.divisor];
      }
      asm volatile("bar.sync 1, 256;" ::: "memory");
      switch ((t.rows + 7) / 8) {
//CASES//
      }
    }
  }
}
