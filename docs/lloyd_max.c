/* Reads a rotated vector of 128 floats; prints its scale, and the code and value of each. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "kvcodec_codebooks.h"

/* The next bfloat16, which is the upper half of a float. */
static float round_up_to_bfloat16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0xffff) & 0xffff0000;
    memcpy(&x, &bits, sizeof x);
    return x;
}

int main(void)
{
    enum { N = 128 };
    const kvcodec_codebook *book = kvcodec_find_codebook(N, 4);
    float x[N];
    double lanes[8] = {0};
    for (int i = 0; i < N; i++) {
        if (scanf("%f", &x[i]) != 1) return 1;
        lanes[i % 8] += (double)x[i] * x[i];
    }
    for (int half = 4; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];

    const float scale = round_up_to_bfloat16((float)(sqrt(lanes[0]) * book->step));
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    printf("%.9g\n", scale);
    for (int i = 0; i < N; i++) {
        int code = 0;
        while (code < book->num_levels - 1 && book->boundaries[code] < x[i] * inverse) code++;
        printf("%d %.9g\n", code, book->levels[code] * scale);
    }
    return 0;
}
