// The upper tail of the normal distribution, 1 - Phi(t) for t >= 0, for the
// exact GELU on every platform. Divided by its fastest factor it is smooth:
//   1 - Phi(t) = e^(-t^2 / 2) * P(q) / (t + 4) where q = (t - 4) / (t + 4)
// P is a polynomial. The variable is that of Shepherd and Laframboise
// ("Chebyshev Approximation of (1 + 2x)exp(x^2)erfc x in 0 <= x < infinity",
// Mathematics of Computation 36, 1981); the coefficients were found by Remez's
// algorithm with 60 digits. They alternate in sign where q is negative, and
// later ones are small, so the sum loses no digits.

#ifndef JAX_BNAR_NATIVE_SCALED_ERFC_H_
#define JAX_BNAR_NATIVE_SCALED_ERFC_H_

namespace jax_bnar {

// P for elements of this many bytes. Up to t = kLargest its relative error is
// as given; above, the tail is 0.
template <int kBytes>
struct ScaledErfc;

template <>
struct ScaledErfc<2> {  // 2^-18.4
  static constexpr double kLargest = 14;
  static constexpr int kTerms = 7;
  static constexpr double kCoefficients[kTerms] = {
      0.755287003,  -0.607889359,   0.387039214,   -0.186637511,
      0.0611089245, -0.00679926096, -0.00475580243};
};

template <>
struct ScaledErfc<4> {  // 2^-26.8
  static constexpr double kLargest = 14;
  static constexpr int kTerms = 10;
  static constexpr double kCoefficients[kTerms] = {
      0.755285135,    -0.607896597,   0.38713689,     -0.186523206,
      0.0604041427,   -0.00752672616, -0.00351497912, 0.00157185831,
      0.000184625177, -0.00012953075};
};

template <>
struct ScaledErfc<8> {  // 2^-55.4
  static constexpr double kLargest = 39;
  static constexpr int kTerms = 23;
  static constexpr double kCoefficients[kTerms] = {
      0.7552851304157515,      -0.6078966419718921,     0.3871374007422195,
      -0.18652185795966542,    0.060396574890666264,    -0.007540188966434881,
      -0.003479692361606849,   0.0016308184532760578,   0.00013334424852463759,
      -0.00023109490368906918, -1.9078439790966127e-06, 3.514456955665465e-05,
      7.149755356542686e-07,   -5.920010961060357e-06,  -6.252284307150541e-07,
      1.02185668916926e-06,    2.6415447385744935e-07,  -1.5659155807562073e-07,
      -7.721025724068062e-08,  1.6068921424246336e-08,  1.4618880795501737e-08,
      -3.3895709892340343e-10, -1.1964926558108124e-09};
};

}  // namespace jax_bnar

#endif  // JAX_BNAR_NATIVE_SCALED_ERFC_H_
