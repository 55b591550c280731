/* How long do the collectives of an MPI library take on this machine? The same sizes, types and loop as `zrt_collectives::bench`:
 *
 *   - sizes are the bytes of the longer side: all_reduce's data, all_gather's result, reduce_scatter's source;
 *   - buffers are touched before, and the same in every call;
 *   - a sample is the mean of a short burst of calls (one call where a call is long), the figure is the median of the samples, of
 *     the slower rank;
 *   - in place and apart are both measured, and the faster counts: libraries differ in which one they are good at.
 *
 * One line per (operation, bytes): `name operation bytes microseconds`. Arguments: the name to print.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER };
static const char *const NAMES[] = {"all_reduce", "all_gather", "reduce_scatter"};

static int ranks, rank;
static float *whole, *other;

static void call(int op, int in_place, int elems) {
    int part = elems / ranks;
    switch (op) {
    case ALL_REDUCE:
        MPI_Allreduce(in_place ? MPI_IN_PLACE : (void *)other, whole, elems, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
    case ALL_GATHER:
        MPI_Allgather(in_place ? MPI_IN_PLACE : (void *)other, part, MPI_FLOAT, whole, part, MPI_FLOAT, MPI_COMM_WORLD);
        break;
    default:
        /* In place the result is at the front of the source. */
        MPI_Reduce_scatter_block(in_place ? MPI_IN_PLACE : (void *)whole, in_place ? whole : other, part, MPI_FLOAT, MPI_SUM,
                                 MPI_COMM_WORLD);
    }
}

static double median_us(int op, int in_place, int elems, int samples, int burst) {
    double *us = malloc(samples * sizeof *us), mine, slowest;
    for (int i = 0; i < samples / 10 + 2; i++)
        call(op, in_place, elems);
    MPI_Barrier(MPI_COMM_WORLD);
    for (int i = 0; i < samples; i++) {
        double begun = MPI_Wtime();
        for (int j = 0; j < burst; j++)
            call(op, in_place, elems);
        us[i] = (MPI_Wtime() - begun) * 1e6 / burst;
    }
    qsort(us, samples, sizeof *us, compare);
    mine = us[samples / 2];
    free(us);
    MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return slowest;
}

int main(int argc, char **argv) {
    static const int bytes[] = {1 << 10, 1 << 20, 64 << 20}, samples[] = {200, 200, 15}, bursts[] = {100, 4, 1};
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int i = 0; i < 3; i++) {
        whole = aligned_alloc(4096, bytes[i]);
        other = aligned_alloc(4096, bytes[i]);
        memset(whole, 0, bytes[i]);
        memset(other, 0, bytes[i]);
        for (int op = ALL_REDUCE; op <= REDUCE_SCATTER; op++) {
            double apart = median_us(op, 0, bytes[i] / 4, samples[i], bursts[i]);
            double within = median_us(op, 1, bytes[i] / 4, samples[i], bursts[i]);
            if (rank == 0)
                printf("%s %s %d %.2f\n", argc > 1 ? argv[1] : "mpi", NAMES[op], bytes[i], apart < within ? apart : within);
        }
        free(whole);
        free(other);
    }
    fflush(stdout);
    MPI_Finalize();
    return 0;
}
