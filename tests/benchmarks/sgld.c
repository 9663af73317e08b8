/* SGLD on the three tasks of tasks.py in plain C, one thread, float32. others.py compiles, checks and times it.

     gcc -O3 -march=native -ffast-math sgld.c -o sgld -lm
     ./sgld a|b|c FOLDER ROWS STEP_SIZE

   FOLDER holds x.bin and y.bin (float32; task a has only y.bin), and theta.bin and index.bin (uint32) for "gradient".
   Commands are lines on standard input, each answered by one line:

     steps N      N steps from zero; answers with the position
     draws N      N positions, 40 steps apart; answers with the means, then the standard deviations
     gradient     of the log density at theta.bin, minibatch index.bin

   As in the block form of tasks.py, the random numbers of some steps are drawn in one go. */

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 16, LANES = 16, APART = 40, MAX_DIM = 854, MAX_BATCH = 100 };
enum { DIM_A = 2, BATCH_A = 10, DIM_B = 123, BATCH_B = 100, DIM_C = 854, BATCH_C = 50 };

static const float *x, *y;
static uint32_t num_rows;
static float step_size, theta[MAX_DIM];
static char task;

/* xoshiro128++ in lanes, which a compiler turns into vector instructions. */
static uint32_t state[4][LANES];

static void seed(uint64_t z) {
    for (int i = 0; i < 4 * LANES; i++) {
        z += 0x9e3779b97f4a7c15;
        uint64_t mixed = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
        state[i / LANES][i % LANES] = mixed >> 32;
    }
}

static uint32_t left(uint32_t bits, int by) { return (bits << by) | (bits >> (32 - by)); }

/* n is rounded up to whole lanes. */
static void draw_bits(uint32_t *restrict out, int n) {
    for (int k = 0; k < n; k += LANES)
        for (int l = 0; l < LANES; l++) {
            uint32_t s0 = state[0][l], s1 = state[1][l], s2 = state[2][l] ^ s0, s3 = state[3][l] ^ s1;
            out[k + l] = left(s0 + state[3][l], 7) + s0;
            state[0][l] = s0 ^ s3;
            state[1][l] = s1 ^ s2;
            state[2][l] = s2 ^ (s1 << 9);
            state[3][l] = left(s3, 11);
        }
}

static void draw_rows(uint32_t *restrict out, int n) {
    draw_bits(out, n);
    for (int i = 0; i < n; i++) out[i] = (uint64_t)out[i] * num_rows >> 32;
}

/* Box and Muller: no branch, so vectors again. n is even, and sin and cos have loops of their own because the pair of
   them is no vector instruction. */
static void draw_normals(float *restrict out, int n) {
    static uint32_t bits[BLOCK * MAX_DIM + 2 * LANES];
    static float radius[BLOCK * MAX_DIM / 2], angle[BLOCK * MAX_DIM / 2];
    int half = n / 2;
    draw_bits(bits, n);
    for (int i = 0; i < half; i++) {
        radius[i] = sqrtf(-2 * logf((float)((int32_t)(bits[i] >> 8) + 1) * 0x1p-24f));
        angle[i] = (float)(int32_t)(bits[half + i] >> 8) * (0x1p-24f * 6.2831853f);
    }
    for (int i = 0; i < half; i++) out[i] = radius[i] * cosf(angle[i]);
    for (int i = 0; i < half; i++) out[half + i] = radius[i] * sinf(angle[i]);
}

/* The gradient of the log density at t, of one minibatch, into g. */
typedef void gradient(const float *t, const uint32_t *rows, float *restrict g);

static void gradient_a(const float *t, const uint32_t *rows, float *restrict g) {
    float sum[DIM_A] = {0}, scale = (float)num_rows / BATCH_A;
    for (int r = 0; r < BATCH_A; r++)
        for (int i = 0; i < DIM_A; i++) sum[i] += y[DIM_A * rows[r] + i] - t[i];
    for (int i = 0; i < DIM_A; i++) g[i] = scale * sum[i] - t[i] / 100;
}

static void gradient_b(const float *t, const uint32_t *rows, float *restrict g) {
    float residual[BATCH_B], scale = (float)num_rows / BATCH_B;
    for (int r = 0; r < BATCH_B; r++) {
        const float *row = x + (size_t)DIM_B * rows[r];
        float logit = 0;
        for (int i = 0; i < DIM_B; i++) logit += row[i] * t[i];
        residual[r] = logit;
    }
    for (int r = 0; r < BATCH_B; r++) residual[r] = scale * (y[rows[r]] - 1 / (1 + expf(-residual[r])));
    for (int i = 0; i < DIM_B; i++) g[i] = -t[i];
    for (int r = 0; r < BATCH_B; r++) {
        const float *row = x + (size_t)DIM_B * rows[r];
        for (int i = 0; i < DIM_B; i++) g[i] += residual[r] * row[i];
    }
}

/* Rows of a minibatch are the last axis of the activations, and the one that vectors run along. */
typedef float columns[BATCH_C];

static inline void forward(int in, int out, const float *w, const float *b, const columns *h, columns *z) {
    for (int o = 0; o < out; o++) {
        for (int r = 0; r < BATCH_C; r++) z[o][r] = b[o];
        for (int i = 0; i < in; i++)
            for (int r = 0; r < BATCH_C; r++) z[o][r] += w[i * out + o] * h[i][r];
    }
}

static inline void relu(int width, columns *z) {
    for (int o = 0; o < width; o++)
        for (int r = 0; r < BATCH_C; r++) z[o][r] = z[o][r] > 0 ? z[o][r] : 0;
}

/* Adds to gw and gb; dz is the gradient by z, dh becomes that by the activations h (0: not wanted). */
static inline void backward(int in, int out, const float *w, const columns *h, const columns *dz, columns *dh, float *gw,
                            float *gb) {
    for (int o = 0; o < out; o++)
        for (int r = 0; r < BATCH_C; r++) gb[o] += dz[o][r];
    for (int i = 0; i < in; i++)
        for (int o = 0; o < out; o++) {
            float sum = 0;
            for (int r = 0; r < BATCH_C; r++) sum += h[i][r] * dz[o][r];
            gw[i * out + o] += sum;
        }
    if (!dh) return;
    for (int i = 0; i < in; i++) {
        for (int r = 0; r < BATCH_C; r++) dh[i][r] = 0;
        for (int o = 0; o < out; o++)
            for (int r = 0; r < BATCH_C; r++) dh[i][r] += w[i * out + o] * dz[o][r];
        for (int r = 0; r < BATCH_C; r++) dh[i][r] = h[i][r] > 0 ? dh[i][r] : 0;
    }
}

/* Layers 18-18-18-8-2; all biases come before all weights. */
static void gradient_c(const float *t, const uint32_t *rows, float *restrict g) {
    enum { B0 = 0, B1 = 18, B2 = 36, B3 = 44, W0 = 46, W1 = W0 + 324, W2 = W1 + 324, W3 = W2 + 144 };
    static columns h0[18], h1[18], h2[18], h3[8], z[2], d0[18], d1[18], d2[8];
    float scale = (float)num_rows / BATCH_C;
    for (int r = 0; r < BATCH_C; r++)
        for (int i = 0; i < 18; i++) h0[i][r] = x[(size_t)18 * rows[r] + i];
    forward(18, 18, t + W0, t + B0, h0, h1), relu(18, h1);
    forward(18, 18, t + W1, t + B1, h1, h2), relu(18, h2);
    forward(18, 8, t + W2, t + B2, h2, h3), relu(8, h3);
    forward(8, 2, t + W3, t + B3, h3, z);
    for (int r = 0; r < BATCH_C; r++) {
        z[1][r] = scale * (y[rows[r]] - 1 / (1 + expf(z[0][r] - z[1][r])));
        z[0][r] = -z[1][r];
    }
    for (int i = 0; i < DIM_C; i++) g[i] = -t[i];
    backward(8, 2, t + W3, h3, z, d2, g + W3, g + B3);
    backward(18, 8, t + W2, h2, d2, d1, g + W2, g + B2);
    backward(18, 18, t + W1, h1, d1, d0, g + W1, g + B1);
    backward(18, 18, t + W0, h0, d0, 0, g + W0, g + B0);
}

/* Inlined once a task, so that all sizes are constants. */
static inline __attribute__((always_inline)) void chain(gradient of_batch, int dim, int batch, long steps) {
    static uint32_t rows[BLOCK * MAX_BATCH];
    static float noise[BLOCK * MAX_DIM], g[MAX_DIM];
    float root = sqrtf(step_size);
    for (long done = 0; done < steps; done += BLOCK) {
        int these = steps - done < BLOCK ? (int)(steps - done) : BLOCK;
        draw_rows(rows, BLOCK * batch);
        draw_normals(noise, BLOCK * dim);
        for (int k = 0; k < these; k++) {
            of_batch(theta, rows + k * batch, g);
            for (int i = 0; i < dim; i++) theta[i] += 0.5f * step_size * g[i] + root * noise[k * dim + i];
        }
    }
}

static void run(long steps) {
    if (task == 'a') chain(gradient_a, DIM_A, BATCH_A, steps);
    if (task == 'b') chain(gradient_b, DIM_B, BATCH_B, steps);
    if (task == 'c') chain(gradient_c, DIM_C, BATCH_C, steps);
}

static void print(const float *values, int n) {
    for (int i = 0; i < n; i++) printf("%.9g ", values[i]);
}

static void draws(int dim, long n) {
    static double sum[MAX_DIM], squares[MAX_DIM];
    memset(sum, 0, sizeof sum);
    memset(squares, 0, sizeof squares);
    for (long k = 0; k < n; k++) {
        run(APART);
        for (int i = 0; i < dim; i++) sum[i] += theta[i], squares[i] += (double)theta[i] * theta[i];
    }
    for (int i = 0; i < dim; i++) printf("%.9g ", sum[i] / n);
    for (int i = 0; i < dim; i++) printf("%.9g ", sqrt(squares[i] / n - sum[i] / n * (sum[i] / n)));
}

static void *contents(const char *folder, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.bin", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    void *data = malloc(size);
    if (!data || fread(data, 1, size, file) != (size_t)size) exit(1);
    fclose(file);
    return data;
}

int main(int argc, char **argv) {
    if (argc != 5) return 1;
    task = argv[1][0];
    x = contents(argv[2], "x");
    y = contents(argv[2], "y");
    num_rows = strtoul(argv[3], NULL, 10);
    step_size = strtof(argv[4], NULL);
    const float *at = contents(argv[2], "theta");
    const uint32_t *index = contents(argv[2], "index");
    if (!y || !at || !index || (task != 'a' && !x)) return 1;
    gradient *of_batch = task == 'a' ? gradient_a : task == 'b' ? gradient_b : gradient_c;
    int dim = task == 'a' ? DIM_A : task == 'b' ? DIM_B : DIM_C;
    char line[64];
    seed(1);
    while (fgets(line, sizeof line, stdin)) {
        long n = 0;
        memset(theta, 0, sizeof theta);
        if (sscanf(line, "steps %ld", &n) == 1) {
            run(n);
            print(theta, dim);
        } else if (sscanf(line, "draws %ld", &n) == 1) {
            draws(dim, n);
        } else {
            static float g[MAX_DIM];
            of_batch(at, index, g);
            print(g, dim);
        }
        printf("\n");
        fflush(stdout);
    }
}
