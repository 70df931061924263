import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;

/** Builds an object graph of about args[0] MiB in a heap that reserves far more, walks and changes it. */
public class Heap {
    record Node(int index, String name, long[] numbers) {}

    public static void main(String[] args) {
        int count = Integer.parseInt(args[0]) * 4200;
        HashMap<String, Node> table = new HashMap<>();
        List<Node> list = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            Node node = new Node(i, "node-" + (i * 2654435761L % 1000000007L), new long[] {i, i * 3L, i * 7L});
            table.put(node.name(), node);
            list.add(node);
        }
        System.out.println("built " + table.size() + " " + list.size());
        for (int turn = 0; turn < 2; turn++) {
            long sum = 0;
            for (Node node : list) {
                Node found = table.get(node.name());
                sum = (sum * 31 + found.index() + found.numbers()[2] + found.name().length()) % 1000000007L;
            }
            System.out.println("walk " + turn + " " + sum);
        }
        for (int i = 0; i < count; i += 2) {
            table.remove(list.get(i).name());
            list.set(i, null);
        }
        // The collection walks and moves the whole heap, and gives back (uncommits) what it empties.
        System.gc();
        long sum = 0;
        for (Node node : list) {
            sum = node == null ? sum + 1 : (sum * 33 + node.numbers()[1]) % 1000000007L;
        }
        System.out.println("left " + table.size() + " " + sum);
    }
}
