# Builds hashes of about ARGV[0] MiB, changes and walks them, prints checksums.
use strict;
use warnings;

my $count = int($ARGV[0] * 3300);
my (%table, %lists);
for my $i (0 .. $count - 1) {
    my $key = sprintf("k%010d", ($i * 2654435761) % 4294967291);
    $table{$key} = "value of $i " . ("x" x ($i % 40));
    push @{ $lists{ $i % 5000 } }, $key;
}
print "built ", scalar(keys %table), "\n";

for my $turn (1 .. 2) {
    my $sum = 0;
    for my $list (sort { $a <=> $b } keys %lists) {
        for my $key (@{ $lists{$list} }) {
            $sum = ($sum * 31 + unpack("%32C*", $table{$key}) * $turn) % 1000000007;
        }
    }
    print "walk $turn $sum\n";
}

for my $list (grep { $_ % 2 } keys %lists) {
    delete $table{$_} for @{ $lists{$list} };
}
my $sum = 0;
$sum = ($sum * 33 + unpack("%32C*", $_ . $table{$_})) % 1000000007 for sort keys %table;
print "left ", scalar(keys %table), " $sum\n";
