// Farthest point sampling, ball query and three nearest neighbours as plain loops on one thread.
//
// Written from what the ops are defined to return; the yardstick of `benchmarks/point_figures.py`.
// All arrays are dense and row by row; clouds are one after the other.

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

float squared_distance(const float* a, const float* b) {
  const float x = a[0] - b[0], y = a[1] - b[1], z = a[2] - b[2];
  return x * x + y * y + z * z;
}

}  // namespace

extern "C" {

// points [clouds, count, 3] -> picked [clouds, npoint]; nearest [count] is scratch.
void farthest_point_sample(int clouds, int count, int npoint, const float* points, float* nearest,
                           int* picked) {
  for (int cloud = 0; cloud < clouds; ++cloud) {
    std::fill(nearest, nearest + count, 1e38f);
    int last = 0;
    for (int step = 0; step < npoint; ++step) {
      picked[step] = last;
      int farthest = 0;
      float most = -1;
      for (int k = 0; k < count; ++k) {
        const float distance = squared_distance(points + 3 * k, points + 3 * last);
        if (distance < nearest[k]) nearest[k] = distance;
        // Of equally far points the one with the smallest index modulo 512, then the smallest.
        if (nearest[k] > most || (nearest[k] == most && k % 512 < farthest % 512)) {
          most = nearest[k];
          farthest = k;
        }
      }
      last = farthest;
    }
    points += 3 * count;
    picked += npoint;
  }
}

// points [clouds, count, 3], queries [clouds, asked, 3] -> idx [clouds, asked, nsample],
// pts_cnt [clouds, asked].
void query_ball_point(int clouds, int count, int asked, float radius, int nsample,
                      const float* points, const float* queries, int* idx, int* pts_cnt) {
  for (int cloud = 0; cloud < clouds; ++cloud) {
    for (int query = 0; query < asked; ++query) {
      int found = 0;
      for (int k = 0; k < count && found < nsample; ++k) {
        const float distance = std::sqrt(squared_distance(queries, points + 3 * k));
        if (std::max(distance, 1e-20f) < radius) idx[found++] = k;
      }
      std::fill(idx + found, idx + nsample, found ? idx[0] : 0);
      *pts_cnt++ = found;
      queries += 3;
      idx += nsample;
    }
    points += 3 * count;
  }
}

// points [clouds, count, 3], known [clouds, known_count, 3] -> dist, idx [clouds, count, 3].
void three_nn(int clouds, int count, int known_count, const float* points, const float* known,
              float* dist, int* idx) {
  for (int cloud = 0; cloud < clouds; ++cloud) {
    for (int k = 0; k < count; ++k) {
      float best[3];
      int where[3] = {0, 0, 0};
      std::fill(best, best + 3, std::numeric_limits<float>::infinity());
      for (int m = 0; m < known_count; ++m) {
        const float distance = squared_distance(points, known + 3 * m);
        if (distance < best[0]) {
          best[2] = best[1], where[2] = where[1];
          best[1] = best[0], where[1] = where[0];
          best[0] = distance, where[0] = m;
        } else if (distance < best[1]) {
          best[2] = best[1], where[2] = where[1];
          best[1] = distance, where[1] = m;
        } else if (distance < best[2]) {
          best[2] = distance, where[2] = m;
        }
      }
      std::copy(best, best + 3, dist);
      std::copy(where, where + 3, idx);
      points += 3;
      dist += 3;
      idx += 3;
    }
    known += 3 * known_count;
  }
}
}
